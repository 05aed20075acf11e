"""RMS norms against plain torch, in each order of rounding, and row by row to the bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.rms_norm import cpu, reference

VARIANTS = [(False, True), (False, False), (True, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("one_plus_weight", "rounds_first"), VARIANTS)
@pytest.mark.parametrize("width", [16, 80, 1024])
def test_rows_match_the_reference(width: int, one_plus_weight: bool, rounds_first: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, 9, width, generator=generator)
    x[:, 5:] *= 1e-3  # here eps counts
    x, weight = x.to(dtype), torch.randn(width, generator=generator).to(dtype)
    found = cpu.rms_norm(x, weight, 1e-5, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
    expected = reference.rms_norm(x, weight, 1e-5, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
    # fp32: sums in another order. bf16: that order may turn a rounding, in few elements and by one unit only.
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-7)
    if dtype == torch.bfloat16:
        assert (found == expected).float().mean() > 0.99
    single = torch.stack([cpu.rms_norm(row, weight, 1e-5, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
                          for row in x.flatten(0, 1)])  # fmt: skip
    assert torch.equal(single.view(x.shape), found)


def test_strided_rows_and_no_rows() -> None:
    x, weight = torch.randn(4, 64)[:, 16:48], torch.ones(32)
    found = cpu.rms_norm(x, weight, 1e-5, one_plus_weight=False, rounds_first=True)
    expected = reference.rms_norm(x, weight, 1e-5, one_plus_weight=False, rounds_first=True)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    assert cpu.rms_norm(x[:0], weight, 1e-5, one_plus_weight=False, rounds_first=True).shape == (0, 32)


@pytest.mark.parametrize("x", [torch.randn(2, 48), torch.randn(2, 32).bfloat16()])
def test_what_does_not_fit_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(KernelArgumentError, match="does not fit weight"):
        cpu.rms_norm(x, torch.ones(32), 1e-5, one_plus_weight=False, rounds_first=True)
    assert not cpu.supports(torch.ones(20))
