"""RMS norms against plain torch, in each order of rounding, and row by row to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.rms_norm import cpu, reference, triton
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize(("kernel", "on"), [(cpu, CPU), (triton, device())], ids=["cpu", "triton"])
VARIANTS = [(False, True), (False, False), (True, False)]


def _random(*shape: int, dtype: torch.dtype, on: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(on)


def _norm(
    kernel: Any, x: torch.Tensor, weight: torch.Tensor, one_plus_weight: bool = False, rounds_first: bool = True
) -> torch.Tensor:
    found: torch.Tensor = kernel.rms_norm(x, weight, 1e-5, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [16, 80, 1024, 4096, 5120])
@KERNELS
def test_rows_match_the_reference(
    kernel: Any, on: torch.device, width: int, variant: tuple[bool, bool], dtype: torch.dtype
) -> None:
    x, weight = _random(2, 9, width, dtype=dtype, on=on), _random(width, dtype=dtype, on=on)
    x[:, 5:] *= 1e-3  # here eps counts
    found, expected = _norm(kernel, x, weight, *variant), _norm(reference, x, weight, *variant)
    # fp32: sums in another order. bf16: that order may turn a rounding, in few elements and by one unit only.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6 if kernel is cpu else 2e-6
    torch.testing.assert_close(found, expected, atol=0, rtol=tolerance)
    if dtype == torch.bfloat16:
        assert (found == expected).float().mean() > 0.99
    single = torch.stack([_norm(kernel, row, weight, *variant) for row in x.flatten(0, 1)])
    assert torch.equal(single.view(x.shape), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first_column", [0, 64, 5])
@KERNELS
def test_heads_of_a_strided_view_are_those_of_a_copy(
    kernel: Any, on: torch.device, first_column: int, dtype: torch.dtype
) -> None:
    together, weight = _random(7, 512, dtype=dtype, on=on), _random(128, dtype=dtype, on=on)
    heads = together[:, first_column : first_column + 384].view(7, 3, 128)
    expected = _norm(kernel, heads.contiguous(), weight)
    assert torch.equal(_norm(kernel, heads, weight), expected)
    assert torch.equal(torch.cat([_norm(kernel, heads[row : row + 1], weight) for row in range(7)]), expected)
    assert torch.equal(torch.stack([_norm(kernel, heads[:, head], weight) for head in range(3)], dim=1), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, reports infinity and NaN
@KERNELS
def test_no_row_sees_the_poison_of_another(kernel: Any, on: torch.device) -> None:
    x, weight = _random(4, 96, dtype=torch.float32, on=on), _random(96, dtype=torch.float32, on=on)
    expected = _norm(kernel, x, weight)
    x[1], x[3] = torch.nan, torch.inf
    assert torch.equal(_norm(kernel, x, weight)[::2], expected[::2])


@KERNELS
def test_no_rows(kernel: Any, on: torch.device) -> None:
    weight = torch.ones(32, device=on)
    assert _norm(kernel, torch.empty(0, 32, device=on), weight).shape == (0, 32)
    assert _norm(kernel, torch.empty(0, 4, 32, device=on), weight).shape == (0, 4, 32)


@pytest.mark.parametrize("x", [torch.randn(2, 48), torch.randn(2, 32).bfloat16()])
@KERNELS
def test_what_does_not_fit_is_refused(kernel: Any, on: torch.device, x: torch.Tensor) -> None:
    with pytest.raises(KernelArgumentError, match="does not fit weight"):
        _norm(kernel, x.to(on), torch.ones(32, device=on))
    assert not kernel.supports(torch.ones(20, device=on))
    assert kernel.supports(torch.ones(32, device=on))
