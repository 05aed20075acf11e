"""Cache writes and moves of the GPU kernel against the reference, byte for byte; interpreted where no GPU is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_write import reference
from outrider.kernels.kv_write import triton as on_gpu
from tests.kernels.triton_device import device

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE = 6, 3, 5


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(device(), dtype)


def make_caches(head_dim: int, value_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values as halves of one tensor, so that no stride follows from the shape."""
    wide = draw(NUM_BLOCKS, 2, NUM_HEADS, BLOCK_SIZE, head_dim + 3, dtype=dtype)
    return [wide[:, 0, :, :, :head_dim], wide[:, 1, :, :, :value_dim]]


def slot_tensor(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64, device=device())


def both(caches: list[torch.Tensor], act: Callable[..., None], expect: Callable[..., None]) -> None:
    theirs = [cache.clone() for cache in caches]
    before = [cache.clone() for cache in caches]
    act(*caches)
    expect(*theirs)
    assert all(torch.equal(a, b) for a, b in zip(caches, theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("num_rows", [1, 7, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (43, 21)])
def test_write_agrees_with_reference(num_rows: int, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    # Keys and values as a model hands them over: slices of one wider tensor.
    wide = draw(num_rows, NUM_HEADS * 3, head_dim, dtype=dtype)
    key, value = wide[:, NUM_HEADS : 2 * NUM_HEADS], wide[:, 2 * NUM_HEADS :, :value_dim]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:num_rows].to(device())
    both(
        make_caches(head_dim, value_dim, dtype),
        lambda k, v: on_gpu.kv_write(key, value, k, v, slots),
        lambda k, v: reference.kv_write(key, value, k, v, slots),
    )


def test_write_skips_padded_rows() -> None:
    rows = draw(4, NUM_HEADS, 16)
    both(
        make_caches(16, 16, torch.float32),
        lambda k, v: on_gpu.kv_write(rows, rows, k, v, slot_tensor(13, -1, 0, 30)),
        lambda k, v: reference.kv_write(rows[[0, 2]], rows[[0, 2]], k, v, slot_tensor(13, 0)),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_move_reads_all_before_it_writes(dtype: torch.dtype) -> None:
    source, target = (3, 4, 5, 6, 29), (4, 5, 6, 3, 0)
    both(
        make_caches(16, 21, dtype),
        lambda k, v: on_gpu.kv_move(k, v, slot_tensor(-1, *source), slot_tensor(-1, *target)),
        lambda k, v: reference.kv_move(k, v, slot_tensor(*source), slot_tensor(*target)),
    )


def test_nan_payloads_survive() -> None:
    pattern = torch.tensor([0x7FC1, -63, 0x7F81, -1] * 4, dtype=torch.int16, device=device())
    rows = pattern.view(torch.bfloat16).expand(1, NUM_HEADS, 16)
    caches = make_caches(16, 16, torch.bfloat16)
    on_gpu.kv_write(rows, rows, caches[0], caches[1], slot_tensor(7))
    for cache in caches:
        assert torch.equal(cache[1, :, 2].contiguous().view(torch.int16), pattern.expand(NUM_HEADS, 16))


def test_nothing_to_do() -> None:
    caches = make_caches(16, 16, torch.float32)
    before, rows = caches[0].clone(), draw(0, NUM_HEADS, 16)
    on_gpu.kv_write(rows, rows, caches[0], caches[1], slot_tensor())
    on_gpu.kv_move(caches[0], caches[1], slot_tensor(), slot_tensor())
    assert torch.equal(caches[0], before)


@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0]), "do not fit"),
        (torch.zeros(2, NUM_HEADS, 16).bfloat16(), torch.tensor([0, 1]), "must agree"),
        (torch.zeros(2, 16, NUM_HEADS).transpose(1, 2), torch.tensor([0, 1]), "contiguous"),
    ],
)
def test_refuses(key: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    caches = make_caches(16, 16, torch.float32)
    with pytest.raises(KernelArgumentError, match=message):
        on_gpu.kv_write(key.to(device()), key.to(device()), caches[0], caches[1], slots.to(device()))
