"""act(gate) * up against fp64, over the whole range of inputs, and row by row to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.gated_activation import cpu, reference, triton
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize(("kernel", "on"), [(cpu, CPU), (triton, device())], ids=["cpu", "triton"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize(
    ("kernel", "on", "width"),
    [(cpu, CPU, 112), *((triton, device(), width) for width in (1, 112, 1030, 14336))],
    ids=["cpu-112", "triton-1", "triton-112", "triton-1030", "triton-14336"],
)
def test_rows_match_the_reference(
    kernel: Any, on: torch.device, width: int, activation: str, dtype: torch.dtype
) -> None:
    both = torch.randn(12, 2 * width, generator=torch.Generator().manual_seed(width))
    both *= torch.tensor([0.01, 1.0, 3.0, 8.0]).repeat_interleave(3)[:, None]
    gate, up = both.to(dtype).to(on).split(width, dim=1)
    found, expected = kernel.gated_activation(gate, up, activation), reference.gated_activation(gate, up, activation)
    # fp32: exp has 2 units in the last place; gelu's cubic, doubled, carries its error into the exponent.
    # bf16: one unit of the activated gate where fp32 and fp64 round it differently.
    # Below 1e-13 torch's tanh, which the oracle uses in fp64, has no digits left.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=tolerance)
    single = torch.cat([kernel.gated_activation(gate[row][None], up[row][None], activation) for row in range(12)])
    assert torch.equal(single, found)
    assert torch.equal(kernel.gated_activation(gate.contiguous(), up.contiguous(), activation), found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, reports infinity and NaN
@KERNELS
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_extreme_gates(kernel: Any, on: torch.device, activation: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e30, -1e3, 1e-30, 100.0, -100.0, torch.nan] * 2, device=on)[None]
    found = kernel.gated_activation(gate, torch.ones_like(gate), activation)[0].tolist()[:8]
    assert found[:2] == [0.0, 0.0]
    assert found[2] == pytest.approx(1e30)
    assert found[3] == 0.0
    assert found[4] == pytest.approx(5e-31)
    assert found[5] == 100.0
    assert found[6] == pytest.approx(0.0, abs=1e-30)
    assert found[7] != found[7]


@KERNELS
def test_no_rows(kernel: Any, on: torch.device) -> None:
    gate = torch.empty(0, 64, device=on)
    assert kernel.gated_activation(gate, gate, "silu").shape == (0, 64)


@KERNELS
def test_what_does_not_fit_is_refused(kernel: Any, on: torch.device) -> None:
    ones = torch.ones(16, 16, device=on)
    for gate, up in ((ones, ones[:2]), (ones, ones.bfloat16()), (ones[0], ones[0])):
        with pytest.raises(KernelArgumentError):
            kernel.gated_activation(gate, up, "silu")
    with pytest.raises(KernelArgumentError, match="contiguous"):
        kernel.gated_activation(ones.t(), ones, "silu")


def test_what_each_kernel_supports() -> None:
    with pytest.raises(KernelArgumentError):
        cpu.gated_activation(torch.ones(2, 20), torch.ones(2, 20), "silu")
    ones = torch.ones(16, 16, device=device())
    with pytest.raises(KernelArgumentError, match="relu"):
        triton.gated_activation(ones, ones, "relu")
    assert triton.supports(14336, torch.bfloat16)
    assert not triton.supports(64, torch.float16)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_rows_on_several_threads_are_the_rows_alone(num_threads: int) -> None:
    before = torch.get_num_threads()
    both = torch.randn(257, 2 * 640, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = both[:, :640], both[:, 640:]
    single = torch.cat([cpu.gated_activation(gate[row : row + 1], up[row : row + 1], "silu") for row in range(257)])
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(cpu.gated_activation(gate, up, "silu"), single)
    finally:
        torch.set_num_threads(before)
