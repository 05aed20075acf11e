"""Rotation in place by the triton kernel gives torch's bits."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.rotary import reference, triton
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rotated", "head_dim"), [(2, 2), (32, 80), (96, 96), (128, 128)])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_bits_are_those_of_torch(num_rows: int, num_rotated: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(num_rows, 8, head_dim, generator=generator).to(dtype).to(device())
    cos, sin = (torch.randn(num_rows, num_rotated, generator=generator).to(dtype).to(device()) for _ in range(2))
    expected = torch.cat((whole[:, :1], reference.rotate(whole[:, 1:6], cos, sin), whole[:, 6:]), dim=1)
    triton.rotate_(whole[:, 1:6], cos, sin)
    assert torch.equal(whole, expected), "the heads beside those that are turned stay as they are"


def test_a_row_is_turned_alone_as_among_others() -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(6, 3, 64, generator=generator).bfloat16().to(device())
    cos, sin = (torch.randn(6, 64, generator=generator).bfloat16().to(device()) for _ in range(2))
    alone = heads.clone()
    triton.rotate_(heads, cos, sin)
    for row in range(6):
        triton.rotate_(alone[row : row + 1], cos[row : row + 1], sin[row : row + 1])
    assert torch.equal(alone, heads)


def test_what_does_not_fit_is_refused() -> None:
    heads = torch.ones(2, 3, 64, device=device())
    for cos in (torch.ones(2, 41), torch.ones(2, 64).bfloat16(), torch.ones(3, 64), torch.ones(2, 96)):
        with pytest.raises(KernelArgumentError):
            triton.rotate_(heads, cos.to(device()), cos.to(device()))
    assert triton.supports(128, torch.bfloat16)
    assert not triton.supports(128, torch.float16)
