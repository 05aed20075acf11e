"""Many linears in one call: each has the bits of cpu_panels.linear, from rows and into rows wherever they lie."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import cpu_panel_batch, cpu_panels

pytestmark = pytest.mark.skipif(not cpu_panels.supports(torch.bfloat16), reason="no bf16 panels here")
NUM_LINEARS = 5


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.usefixtures("_num_threads")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 12), (64, 64), (130, 20), (512, 128), (128, 1536)])
@pytest.mark.parametrize("num_rows", [1, 3, 17, 130])
def test_each_has_the_bits_of_its_own_call(num_outputs: int, num_inputs: int, num_rows: int) -> None:
    weights = random_bf16(NUM_LINEARS, num_outputs, num_inputs)
    # Heads beside each other in a row, and something else around both.
    x = random_bf16(num_rows, NUM_LINEARS, num_inputs + 6).transpose(0, 1)[..., 2:-4]
    around = torch.full((num_rows, NUM_LINEARS, num_outputs + 8), 7.0).bfloat16()
    out = around.transpose(0, 1)[..., 8:]
    cpu_panel_batch.linears(x, cpu_panel_batch.pack(weights), out)
    packed = [cpu_panels.pack(weight) for weight in weights]
    expected = torch.stack([cpu_panels.linear(rows, each) for rows, each in zip(x, packed, strict=True)])
    assert torch.equal(out, expected)
    assert bool((around[..., :8] == 7.0).all())


def test_no_rows() -> None:
    packed = cpu_panel_batch.pack(random_bf16(NUM_LINEARS, 16, 12))
    cpu_panel_batch.linears(random_bf16(NUM_LINEARS, 0, 12), packed, random_bf16(NUM_LINEARS, 0, 16))


def test_odd_widths_and_other_dtypes_are_not_taken() -> None:
    assert cpu_panel_batch.supports(torch.bfloat16, 12)
    assert not cpu_panel_batch.supports(torch.bfloat16, 13)
    assert not cpu_panel_batch.supports(torch.float32, 12)


@pytest.mark.parametrize(
    ("x", "out", "named"),
    [
        (random_bf16(4, 3, 12), random_bf16(NUM_LINEARS, 3, 16), "x is"),
        (random_bf16(NUM_LINEARS, 3, 12).float(), random_bf16(NUM_LINEARS, 3, 16), "x is torch.float32"),
        (random_bf16(NUM_LINEARS, 12, 3).transpose(1, 2), random_bf16(NUM_LINEARS, 3, 16), "x is"),
        (random_bf16(NUM_LINEARS, 3, 12), random_bf16(NUM_LINEARS, 2, 16), "out is"),
    ],
)
def test_refuses(x: torch.Tensor, out: torch.Tensor, named: str) -> None:
    packed = cpu_panel_batch.pack(random_bf16(NUM_LINEARS, 16, 12))
    with pytest.raises(KernelArgumentError, match=named):
        cpu_panel_batch.linears(x, packed, out)
