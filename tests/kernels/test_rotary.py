"""Rotation gives torch's bits."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.rotary import cpu, reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rotated", "head_dim"), [(32, 32), (64, 64), (32, 80), (128, 128)])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_bits_are_those_of_torch(num_rows: int, num_rotated: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(num_rows, 6, head_dim, generator=generator).to(dtype)
    cos, sin = (torch.randn(num_rows, num_rotated, generator=generator).to(dtype) for _ in range(2))
    before = whole.clone()
    assert torch.equal(cpu.rotate(whole[:, 1:4], cos, sin), reference.rotate(before[:, 1:4], cos, sin))
    assert torch.equal(whole, before)


def test_what_does_not_fit_is_refused() -> None:
    heads = torch.ones(2, 3, 64)
    for cos in (torch.ones(2, 40), torch.ones(2, 64).bfloat16(), torch.ones(3, 64), torch.ones(2, 96)):
        with pytest.raises(KernelArgumentError):
            cpu.rotate(heads, cos, cos)
