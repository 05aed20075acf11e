"""Scores of a sparse attention's indexer against fp64, and the same bits for every division of rows and keys."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.index_scores import cpu, reference

NUM_SLOTS = 300


def arguments(
    num_rows: int, num_heads: int, head_dim: int, num_listed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * num_heads + head_dim + num_listed)
    query = torch.randn(num_rows, num_heads, head_dim, generator=generator)
    weights = torch.randn(num_rows, num_heads, generator=generator)
    keys = torch.randn(NUM_SLOTS, head_dim, generator=generator).to(dtype)
    slots = torch.randint(0, NUM_SLOTS, (num_rows, num_listed), generator=generator, dtype=torch.int32)
    slots[:, num_listed // 2 :: 5] = -1
    return query, weights, keys, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 16), (4, 24), (7, 32), (64, 128)])
@pytest.mark.parametrize("num_listed", [1, 63, 64, 1100])
def test_scores_match_the_reference(num_listed: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    given = arguments(3, num_heads, head_dim, num_listed, dtype)
    found, expected = cpu.index_scores(*given), reference.index_scores(*given)
    torch.testing.assert_close(found, expected, atol=2e-5 * (num_heads * head_dim) ** 0.5, rtol=1e-5)
    assert torch.equal(found == -torch.inf, given[3] == -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scores_bits_are_its_own(dtype: torch.dtype) -> None:
    """Alone, among other rows, at another place of another list, and from a cache in another order."""
    query, weights, keys, slots = arguments(5, 6, 40, 1300, dtype)
    together = cpu.index_scores(query, weights, keys, slots)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(cpu.index_scores(query[one], weights[one], keys, slots[one, 7:400]), together[one, 7:400])
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))
    places = torch.argsort(order).int()
    moved = torch.where(slots < 0, slots, places[slots.long()])
    assert torch.equal(cpu.index_scores(query, weights, keys[order], moved), together)


def test_keys_may_be_a_view_of_wider_rows() -> None:
    query, weights, keys, slots = arguments(2, 3, 16, 70, torch.bfloat16)
    wide = torch.randn(NUM_SLOTS, 48).to(torch.bfloat16)
    wide[:, 16:32] = keys
    expected = cpu.index_scores(query, weights, keys, slots)
    assert torch.equal(cpu.index_scores(query, weights, wide[:, 16:32], slots), expected)


def test_no_rows_and_no_keys_have_no_scores() -> None:
    query, weights, keys, slots = arguments(2, 3, 16, 70, torch.float32)
    assert cpu.index_scores(query[:0], weights[:0], keys, slots[:0]).shape == (0, 70)
    assert cpu.index_scores(query, weights, keys, slots[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("slot", [NUM_SLOTS, -2])
def test_slots_outside_the_cache_are_refused(slot: int) -> None:
    query, weights, keys, slots = arguments(2, 3, 16, 70, torch.float32)
    slots[1, 69] = slot
    with pytest.raises(KernelArgumentError, match="a slot lies outside the cache"):
        cpu.index_scores(query, weights, keys, slots)


def test_tensors_that_do_not_fit_are_refused() -> None:
    query, weights, keys, slots = arguments(2, 3, 16, 70, torch.float32)
    wrong = [
        (query[:, :, :8], weights, keys[:, :8], slots),
        (query, weights[:, :2], keys, slots),
        (query, weights, keys.half(), slots),
        (query, weights, keys, slots.long()),
        (query[0], weights, keys, slots),
    ]
    for given in wrong:
        with pytest.raises(KernelArgumentError, match="query"):
            cpu.index_scores(*given)
