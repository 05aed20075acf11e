"""Gated norms against plain torch, in each order, and row by row to the bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.recurrent.gated_norm import cpu, reference
from outrider.kernels.recurrent.gated_norm.arguments import ACTIVATIONS, GatedNormLayer


def draw(dtype: torch.dtype, num_rows: int = 9, width: int = 144) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(shape, generator=generator) for shape in ((num_rows, width), (num_rows, width), (width,))
    )
    x[5:] *= 1e-3  # here eps counts
    return x.to(dtype), (3 * gate).to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rounds_first", [False, True])
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("group_size", [24, 72, 144])
def test_rows_match_the_reference(
    group_size: int, gates_first: bool, rounds_first: bool, activation: str, dtype: torch.dtype
) -> None:
    x, gate, weight = draw(dtype)
    layer = GatedNormLayer(weight, group_size, 1e-5, gates_first, rounds_first, activation)
    found, expected = cpu.gated_norm(x, gate, layer), reference.gated_norm(x, gate, layer)
    # fp32: sums in another order, the sigmoid. bf16: these may turn a rounding, in few elements, before and after the
    # weight and the gate.
    torch.testing.assert_close(found, expected, atol=1e-30, rtol=2e-6 if dtype == torch.float32 else 2**-6)
    if dtype == torch.bfloat16:
        assert (found == expected).float().mean() > 0.99
    single = torch.cat([cpu.gated_norm(x[row : row + 1], gate[row : row + 1], layer) for row in range(9)])
    assert torch.equal(single, found)


@pytest.mark.parametrize("module", [cpu, reference])
def test_one_weight_for_all_groups_is_that_weight_repeated(module: object) -> None:
    x, gate, weight = draw(torch.float32)
    found = [
        module.gated_norm(x, gate, GatedNormLayer(each, 24, 1e-5, False, True))  # type: ignore[attr-defined]
        for each in (weight[:24], weight[:24].repeat(6))
    ]
    assert torch.equal(*found)


def test_strided_rows_threads_and_no_rows() -> None:
    x, gate, weight = draw(torch.float32, 1000, 288)
    layer = GatedNormLayer(weight[:144], 48, 1e-5, gates_first=True, rounds_first=False)
    expected = cpu.gated_norm(x[:, 144:].contiguous(), gate[:, 144:].contiguous(), layer)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(cpu.gated_norm(x[:, 144:], gate[:, 144:], layer), expected)
    finally:
        torch.set_num_threads(before)
    assert cpu.gated_norm(x[:0, :144], gate[:0, :144], layer).shape == (0, 144)


def test_what_does_not_fit_is_refused() -> None:
    x, gate, weight = draw(torch.float32)
    for x_of, gate_of, weight_of in ((x[:, :100], gate, weight), (x, gate.bfloat16(), weight), (x, gate, weight[:50])):
        with pytest.raises(KernelArgumentError, match="do not fit weight"):
            cpu.gated_norm(x_of, gate_of, GatedNormLayer(weight_of, 48, 1e-5, True, True))
