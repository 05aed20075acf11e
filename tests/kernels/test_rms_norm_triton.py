"""RMS norms of the triton kernel against plain torch, in each order of rounding, and row by row to the bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.rms_norm import reference, triton
from tests.kernels.triton_device import device

VARIANTS = [(False, True), (False, False), (True, False)]


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device())


def _norm(
    x: torch.Tensor, weight: torch.Tensor, one_plus_weight: bool = False, rounds_first: bool = True
) -> torch.Tensor:
    return triton.rms_norm(x, weight, 1e-5, one_plus_weight=one_plus_weight, rounds_first=rounds_first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("one_plus_weight", "rounds_first"), VARIANTS)
@pytest.mark.parametrize("width", [16, 80, 1024, 4096])
def test_rows_match_the_reference(width: int, one_plus_weight: bool, rounds_first: bool, dtype: torch.dtype) -> None:
    x, weight = _random(2, 9, width, dtype=dtype), _random(width, dtype=dtype)
    x[:, 5:] *= 1e-3  # here eps counts
    found = _norm(x, weight, one_plus_weight, rounds_first)
    expected = reference.rms_norm(x, weight, 1e-5, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
    # fp32: sums in another order. bf16: that order may turn a rounding, in few elements and by one unit only.
    torch.testing.assert_close(found, expected, atol=0, rtol=2e-6 if dtype == torch.float32 else 2**-7)
    if dtype == torch.bfloat16:
        assert (found == expected).float().mean() > 0.99
    single = torch.stack([_norm(row, weight, one_plus_weight, rounds_first) for row in x.flatten(0, 1)])
    assert torch.equal(single.view(x.shape), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first_column", [0, 64, 5])
def test_heads_of_a_strided_view_are_those_of_a_copy(first_column: int, dtype: torch.dtype) -> None:
    together, weight = _random(7, 512, dtype=dtype), _random(128, dtype=dtype)
    heads = together[:, first_column : first_column + 384].view(7, 3, 128)
    expected = _norm(heads.contiguous(), weight)
    assert torch.equal(_norm(heads, weight), expected)
    assert torch.equal(torch.cat([_norm(heads[row : row + 1], weight) for row in range(7)]), expected)
    assert torch.equal(torch.stack([_norm(heads[:, head], weight) for head in range(3)], dim=1), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, reports infinity and NaN
def test_no_row_sees_the_poison_of_another() -> None:
    x, weight = _random(4, 96, dtype=torch.float32), _random(96, dtype=torch.float32)
    expected = _norm(x, weight)
    x[1], x[3] = torch.nan, torch.inf
    assert torch.equal(_norm(x, weight)[::2], expected[::2])


def test_no_rows() -> None:
    weight = torch.ones(32, device=device())
    assert _norm(torch.empty(0, 32, device=device()), weight).shape == (0, 32)
    assert _norm(torch.empty(0, 4, 32, device=device()), weight).shape == (0, 4, 32)


@pytest.mark.parametrize("x", [torch.randn(2, 48), torch.randn(2, 32).bfloat16()])
def test_what_does_not_fit_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(KernelArgumentError, match="does not fit weight"):
        _norm(x.to(device()), torch.ones(32, device=device()))
    assert not triton.supports(torch.ones(20, device=device()))
    assert triton.supports(torch.ones(32, device=device()))
