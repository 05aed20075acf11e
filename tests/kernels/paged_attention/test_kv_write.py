"""Cache writes and moves on the CPU against the reference, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_write import cpu, reference

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE = 6, 3, 5


def make_caches(head_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    key_cache, value_cache = (
        torch.randn(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, dim, generator=generator).to(dtype)
        for dim in (head_dim, value_dim)
    )
    return key_cache, value_cache


def both(caches: tuple[torch.Tensor, ...], act: Callable[..., None], expect: Callable[..., None]) -> None:
    mine, theirs = [c.clone() for c in caches], [c.clone() for c in caches]
    act(*mine)
    expect(*theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(mine, caches, strict=True))


@pytest.mark.parametrize("num_rows", [1, 7, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (43, 21)])
def test_write_agrees_with_reference(num_rows: int, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    caches = make_caches(head_dim, value_dim, dtype)
    # Keys and values as a model hands them over: slices of one wider tensor.
    wide = torch.randn(num_rows, NUM_HEADS * 2, head_dim).to(dtype)
    key, value = wide[:, :NUM_HEADS], wide[:, NUM_HEADS:, :value_dim]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_rows]
    both(
        caches,
        lambda k, v: cpu.kv_write(key, value, k, v, slots),
        lambda k, v: reference.kv_write(key, value, k, v, slots),
    )


def test_write_puts_each_row_where_its_slot_says() -> None:
    key_cache, value_cache = make_caches(16, 16, torch.float32)
    key, value = torch.randn(2, NUM_HEADS, 16), torch.randn(2, NUM_HEADS, 16)
    cpu.kv_write(key, value, key_cache, value_cache, torch.tensor([13, 0]))
    assert torch.equal(key_cache[2, :, 3], key[0])
    assert torch.equal(value_cache[2, :, 3], value[0])
    assert torch.equal(key_cache[0, :, 0], key[1])


def test_padding_goes_nowhere() -> None:
    key_cache, value_cache = make_caches(16, 16, torch.float32)
    before = key_cache.clone(), value_cache.clone()
    rows = torch.randn(3, NUM_HEADS, 16)
    cpu.kv_write(rows, rows, key_cache, value_cache, torch.tensor([-1, -1, 13]))
    assert torch.equal(key_cache[2, :, 3], rows[2])
    for cache, old in zip((key_cache, value_cache), before, strict=True):
        cache[2, :, 3] = old[2, :, 3]
        assert torch.equal(cache, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_move_reads_all_before_it_writes(dtype: torch.dtype) -> None:
    caches = make_caches(16, 21, dtype)
    source, target = torch.tensor([3, 4, 5, 6, 29]), torch.tensor([4, 5, 6, 3, 0])
    both(
        caches,
        lambda k, v: cpu.kv_move(k, v, source, target),
        lambda k, v: reference.kv_move(k, v, source, target),
    )


def test_nothing_to_do() -> None:
    key_cache, value_cache = make_caches(16, 16, torch.float32)
    before, none = key_cache.clone(), torch.empty(0, dtype=torch.int64)
    rows = torch.empty(0, NUM_HEADS, 16)
    cpu.kv_write(rows, rows, key_cache, value_cache, none)
    cpu.kv_move(key_cache, value_cache, none, none)
    assert torch.equal(key_cache, before)


@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0, 30]), "outside"),
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0, -2]), "outside"),
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0]), "do not fit"),
        (torch.zeros(2, NUM_HEADS, 16).bfloat16(), torch.tensor([0, 1]), "must agree"),
        (torch.zeros(2, 16, NUM_HEADS).transpose(1, 2), torch.tensor([0, 1]), "contiguous"),
    ],
)
def test_refuses(key: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    key_cache, value_cache = make_caches(16, 16, torch.float32)
    with pytest.raises(KernelArgumentError, match=message):
        cpu.kv_write(key, key, key_cache, value_cache, slots)
