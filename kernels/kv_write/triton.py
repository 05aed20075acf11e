"""Writing keys and values into a paged cache on an NVIDIA GPU: one launch for both.

Slots outside the cache (usually -1) are padding: neither written nor, in a move, read. Grids follow from shapes alone
and nothing is read back from the device: safe under CUDA graphs.

Minimum traffic at 256 rows, Hkv 8, D 128, bf16: 1 MB read, 1 MB written: 0.6 us at 3.35 TB/s (H100), 0.4 us at 4.8 TB/s
(H200), less than a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes.layout import is_coded, scales_of
from outrider.kernels.kv_write.triton_codes import write_codes


@triton.jit
def _copy_heads(  # type: ignore[no-untyped-def]
    rows, cache, row_head_stride, cache_head_stride, num_heads,
    DIM: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_DIM: tl.constexpr, INTO_CACHE: tl.constexpr,
):  # fmt: skip
    """All heads of one row; rows and cache point to the row and to its slot."""
    head = tl.arange(0, PADDED_HEADS)[:, None].to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    is_used = (head < num_heads) & (dim < DIM)
    uncached = rows + head * row_head_stride + dim
    cached = cache + head * cache_head_stride + dim
    if INTO_CACHE:
        tl.store(cached, tl.load(uncached, mask=is_used), mask=is_used)
    else:
        tl.store(uncached, tl.load(cached, mask=is_used), mask=is_used)


@triton.jit(do_not_specialize=["num_slots"])
def _copy_slots(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, slots,
    num_slots, num_heads, key_row_stride, key_row_head_stride, value_row_stride, value_row_head_stride,
    key_block_stride, key_head_stride, key_slot_stride, value_block_stride, value_head_stride, value_slot_stride,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, INTO_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid (T,): key and value of one row, into or out of the cache."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot < 0) | (slot >= num_slots):
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    _copy_heads(
        key + row * key_row_stride, key_cache + block * key_block_stride + offset * key_slot_stride,
        key_row_head_stride, key_head_stride, num_heads, KEY_DIM, PADDED_HEADS, PADDED_KEY_DIM, INTO_CACHE,
    )  # fmt: skip
    _copy_heads(
        value + row * value_row_stride, value_cache + block * value_block_stride + offset * value_slot_stride,
        value_row_head_stride, value_head_stride, num_heads, VALUE_DIM, PADDED_HEADS, PADDED_VALUE_DIM, INTO_CACHE,
    )  # fmt: skip


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes keys and values as `reference.kv_write` does; slot -1 is padding. Raises KernelArgumentError."""
    if is_coded(key_cache):
        _check_slots(slot_mapping)
        _check(key, key_cache, slot_mapping)
        _check(value, value_cache, slot_mapping)
        if slot_mapping.shape[0]:
            write_codes(key, value, key_cache, value_cache, slot_mapping)
        return
    _launch(key, value, key_cache, value_cache, slot_mapping, into_cache=True)


def kv_move(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """Copies slots as `reference.kv_move` does; padding is -1 in both. Raises KernelArgumentError."""
    if source_slots.shape != target_slots.shape:
        raise KernelArgumentError("source_slots and target_slots must have the same length")
    if is_coded(key_cache):
        kv_move(scales_of(key_cache)[..., None], scales_of(value_cache)[..., None], source_slots, target_slots)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key, value = (
        cache.new_empty((source_slots.shape[0], cache.shape[1], cache.shape[3])) for cache in (key_cache, value_cache)
    )
    _launch(key, value, key_cache, value_cache, source_slots, into_cache=False)
    _launch(key, value, key_cache, value_cache, target_slots, into_cache=True)


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    into_cache: bool,
) -> None:
    _check_slots(slots)
    _check(key, key_cache, slots)
    _check(value, value_cache, slots)
    num_blocks, num_heads, block_size, head_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise KernelArgumentError("key_cache and value_cache must agree in blocks, heads and block size")
    if slots.shape[0] == 0:
        return
    _copy_slots[(slots.shape[0],)](
        key, value, key_cache, value_cache, slots, num_blocks * block_size, num_heads,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        BLOCK_SIZE=block_size, KEY_DIM=head_dim, VALUE_DIM=value_dim, PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KEY_DIM=triton.next_power_of_2(head_dim), PADDED_VALUE_DIM=triton.next_power_of_2(value_dim),
        INTO_CACHE=into_cache, num_warps=4,
    )  # fmt: skip


def _check_slots(slots: torch.Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise KernelArgumentError("slots must be an int64 vector")


def _check(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    if rows.shape != (slots.shape[0], cache.shape[1], cache.shape[3]):
        raise KernelArgumentError(f"rows {tuple(rows.shape)} do not fit slots or cache {tuple(cache.shape)}")
    if rows.dtype != cache.dtype and not (is_coded(cache) and rows.dtype in (torch.bfloat16, torch.float32)):
        raise KernelArgumentError(f"rows ({rows.dtype}) and cache ({cache.dtype}) must agree")
    if rows.stride(-1) != 1 or cache.stride(-1) != 1:
        raise KernelArgumentError("rows and cache must be contiguous in their last dimension")
