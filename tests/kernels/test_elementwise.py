"""Lookups, sums, joins and conversions against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.elementwise import cpu
from outrider.kernels.errors import KernelArgumentError

STRANGE = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38, -3e38, 1.0, 1.0039062, 1.0117188, -2.5]


def _numbers(num_elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    numbers = 3 * torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))
    numbers[: len(STRANGE)] = torch.tensor(STRANGE).roll(seed)
    return numbers.to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Of a NaN only that it is one: its payload is nobody's business.
    return torch.nan_to_num(tensor.float(), nan=12345.0).view(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_torchs(dtype: torch.dtype) -> None:
    left, right = _numbers(4096, dtype, 1), _numbers(4096, dtype, 2)
    out = torch.empty_like(left)
    cpu.add(left, right, out)
    assert torch.equal(_bits(out), _bits(left + right))


def test_widening_is_exact() -> None:
    source = _numbers(4096, torch.bfloat16, 3)
    out = torch.empty(4096)
    cpu.widen(source, out)
    assert torch.equal(_bits(out), _bits(source.float()))


@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 2), (7,)])
def test_rows_are_looked_up(shape: tuple[int, ...]) -> None:
    table = torch.randn(shape)
    indices = torch.tensor([[6, 0], [3, 3]])
    out = table.new_empty((2, 2, *shape[1:]))
    cpu.gather(table, indices, out)
    assert torch.equal(out, table[indices])


@pytest.mark.parametrize("index", [-1, 7, 1 << 40])
def test_an_index_outside_the_table_is_an_error(index: int) -> None:
    with pytest.raises(KernelArgumentError, match="outside the table"):
        cpu.gather(torch.zeros(7, 4), torch.tensor([2, index]), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("widths", [(32, 32), (5, 96), (1, 1)])
def test_rows_are_joined(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    left, right = (torch.randn(1, 7, width).to(dtype) for width in widths)
    out = torch.empty(1, 7, sum(widths), dtype=dtype)
    cpu.join(left, right, out)
    assert torch.equal(out, torch.cat((left, right), dim=-1))


def test_what_does_not_fit_is_not_taken() -> None:
    rows = torch.zeros(4, 16)
    assert cpu.takes_sum(rows, rows)
    assert not cpu.takes_sum(rows, rows[:1])
    assert not cpu.takes_sum(rows, rows.bfloat16())
    assert not cpu.takes_sum(rows.t(), rows.t())
    assert cpu.takes_join(rows, torch.zeros(4, 3))
    assert not cpu.takes_join(rows, rows[:1])
    assert not cpu.takes_join(rows, rows.bfloat16())
    assert not cpu.takes_join(torch.zeros(16, 16).t(), torch.zeros(16, 16))
    assert not cpu.takes_sum(rows[:, :15].contiguous(), rows[:, :15].contiguous())
    assert not cpu.takes_widening(rows)
    assert not cpu.takes_rows(rows.t(), torch.tensor([0]))
    assert not cpu.takes_rows(rows, torch.tensor([0], dtype=torch.int32))
