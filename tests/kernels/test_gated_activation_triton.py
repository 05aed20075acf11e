"""act(gate) * up of the triton kernel against fp64, over the whole range of inputs, and row by row to the bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.gated_activation import reference, triton
from tests.kernels.triton_device import device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 112, 1030])
def test_rows_match_the_reference(width: int, activation: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    both = torch.randn(12, 2 * width, generator=generator)
    both *= torch.tensor([0.01, 1.0, 3.0, 8.0]).repeat_interleave(3)[:, None]
    both = both.to(dtype).to(device())
    gate, up = both[:, :width], both[:, width:]
    found, expected = triton.gated_activation(gate, up, activation), reference.gated_activation(gate, up, activation)
    # fp32: exp rounds its scaled argument; gelu's cubic, doubled, carries its error into the exponent.
    # bf16: one unit of the activated gate where fp32 and fp64 round it differently.
    # Below 1e-13 torch's tanh, which the oracle uses in fp64, has no digits left.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=tolerance)
    single = torch.cat([triton.gated_activation(gate[row][None], up[row][None], activation) for row in range(12)])
    assert torch.equal(single, found)
    assert torch.equal(triton.gated_activation(gate.contiguous(), up.contiguous(), activation), found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, reports infinity and NaN
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_extreme_gates(activation: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e30, -1e3, 1e-30, 100.0, -100.0, torch.nan], device=device())[None]
    found = triton.gated_activation(gate, torch.ones_like(gate), activation)[0].tolist()
    assert found[:2] == [0.0, 0.0]
    assert found[2] == pytest.approx(1e30)
    assert found[3] == 0.0
    assert found[4] == pytest.approx(5e-31)
    assert found[5] == 100.0
    assert found[6] == pytest.approx(0.0, abs=1e-30)
    assert found[7] != found[7]


def test_no_rows() -> None:
    gate = torch.empty(0, 64, device=device())
    assert triton.gated_activation(gate, gate, "silu").shape == (0, 64)


def test_what_does_not_fit_is_refused() -> None:
    ones = torch.ones(16, 16, device=device())
    for gate, up in ((ones, ones[:2]), (ones, ones.bfloat16()), (ones[0], ones[0])):
        with pytest.raises(KernelArgumentError):
            triton.gated_activation(gate, up, "silu")
    with pytest.raises(KernelArgumentError, match="contiguous"):
        triton.gated_activation(ones.t(), ones, "silu")
    with pytest.raises(KernelArgumentError, match="relu"):
        triton.gated_activation(ones, ones, "relu")
    assert triton.supports(14336, torch.bfloat16)
    assert not triton.supports(64, torch.float16)
