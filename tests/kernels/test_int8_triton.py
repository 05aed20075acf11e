"""The triton linears in integers: the law to the bit, which is the CPU's (int8.reference)."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import triton_codes
from outrider.kernels.linear.int8 import reference
from outrider.kernels.linear.int8 import triton as int8_triton
from tests.kernels.test_code_panels import CASES, integers, make_codes, rows_and_bias
from tests.kernels.test_int8_panels import TAKEN
from tests.kernels.triton_device import device


@pytest.mark.parametrize("name", TAKEN)
def test_every_row_has_the_bits_of_the_law(name: str) -> None:
    codes = TAKEN[name]
    packed = int8_triton.pack([codes], device())
    assert packed.kinds == ("w4a8" if CASES[name][1] == "i4" else "w8a8",)
    x, bias = (each.to(device()) for each in rows_and_bias(codes))
    expected = reference.linear(x[:17].cpu(), codes, bias.cpu())
    for num_rows in (1, 17):
        found = int8_triton.linear(x[:num_rows], packed, bias).cpu()
        assert torch.equal(found, expected[:num_rows]), num_rows
    ids = torch.tensor([codes.shape[0] - 1, 0, 17], device=device())
    assert torch.equal(triton_codes.rows(ids, packed).cpu(), codes.dequantised().bfloat16()[ids.cpu()])


def test_weights_of_several_kinds_and_groups_are_one_linear() -> None:
    parts = [
        make_codes(integers(37, 96, -8, 8), 32),
        make_codes(integers(20, 96, 0, 16), 16, minimums=True),
        make_codes(integers(33, 96, -100, 100), 96),
    ]
    packed = int8_triton.pack(parts, device())
    x, _ = rows_and_bias(parts[0])
    expected = torch.cat([reference.linear(x[:3], part, size=16) for part in parts], 1)
    assert torch.equal(int8_triton.linear(x[:3].to(device()), packed).cpu(), expected)


def test_only_a_row_with_what_is_no_number_becomes_nan() -> None:
    codes = TAKEN["q4_1"]
    x, _ = rows_and_bias(codes)
    x = x[:4].clone()
    x[1, 40], x[2, 0], x[3] = torch.inf, torch.nan, 0.0
    found = int8_triton.linear(x.to(device()), int8_triton.pack([codes], device())).cpu()
    assert torch.equal(found.isnan(), reference.linear(x, codes).isnan())
    assert torch.equal(found.nan_to_num(), reference.linear(x, codes).nan_to_num())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="cannot be packed"):
        int8_triton.pack([CASES["fp8-block"][0]], device())
    packed = int8_triton.pack([TAKEN["q8_0"]], device())
    with pytest.raises(KernelArgumentError, match=r"x is bfloat16 \[2, 95\], expected bfloat16 \[..., 96\]"):
        int8_triton.linear(torch.zeros(2, 95, dtype=torch.bfloat16, device=device()), packed)
