"""Writing keys and values into a paged cache of 8-bit codes on an NVIDIA GPU: one launch for both.

The law is that of kernels/kv_codes/reference. Slots outside the cache are padding. Safe under CUDA graphs, as `triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.kv_codes.layout import LARGEST_CODE
from outrider.kernels.kv_codes.triton import as_arguments, narrow, scale_of


@triton.jit
def _write_heads(  # type: ignore[no-untyped-def]
    rows, codes, scales, row_head_stride, code_head_stride, scale_head_stride, num_heads,
    DIM: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_DIM: tl.constexpr,
    LARGEST: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """All heads of one row; rows, codes and scales point to the row and to its slot."""
    head = tl.arange(0, PADDED_HEADS).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    is_used = (head < num_heads)[:, None] & (dim < DIM)[None, :]
    row = tl.load(rows + head[:, None] * row_head_stride + dim[None, :], mask=is_used, other=0.0).to(tl.float32)
    scale = scale_of(row, is_used, LARGEST)
    tl.store(scales + head * scale_head_stride, scale, mask=head < num_heads)
    tl.store(
        codes + head[:, None] * code_head_stride + dim[None, :], narrow(row, scale, LARGEST, IS_E4M3), mask=is_used
    )


@triton.jit(do_not_specialize=["num_slots"])
def _write_slots(  # type: ignore[no-untyped-def]
    key, value, key_codes, value_codes, key_scales, value_scales, slots,
    num_slots, num_heads, key_row_stride, key_row_head_stride, value_row_stride, value_row_head_stride,
    key_block_stride, key_head_stride, key_slot_stride, value_block_stride, value_head_stride, value_slot_stride,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, LARGEST: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Grid (T,): key and value of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot < 0) | (slot >= num_slots):
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    # A scale is 4 bytes, a code one: the scales' strides are a quarter.
    _write_heads(
        key + row * key_row_stride, key_codes + block * key_block_stride + offset * key_slot_stride,
        key_scales + block * (key_block_stride // 4) + offset,
        key_row_head_stride, key_head_stride, key_head_stride // 4, num_heads,
        KEY_DIM, PADDED_HEADS, PADDED_KEY_DIM, LARGEST, IS_E4M3,
    )  # fmt: skip
    _write_heads(
        value + row * value_row_stride, value_codes + block * value_block_stride + offset * value_slot_stride,
        value_scales + block * (value_block_stride // 4) + offset,
        value_row_head_stride, value_head_stride, value_head_stride // 4, num_heads,
        VALUE_DIM, PADDED_HEADS, PADDED_VALUE_DIM, LARGEST, IS_E4M3,
    )  # fmt: skip


def write_codes(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes bf16 or fp32 rows into coded caches, for triton.kv_write, which has checked the arguments."""
    num_blocks, num_heads, block_size, head_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    (key_codes, key_scales), (value_codes, value_scales) = as_arguments(key_cache), as_arguments(value_cache)
    _write_slots[(slots.shape[0],)](
        key, value, key_codes, value_codes, key_scales, value_scales, slots, num_blocks * block_size, num_heads,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        BLOCK_SIZE=block_size, KEY_DIM=head_dim, VALUE_DIM=value_dim, PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KEY_DIM=triton.next_power_of_2(head_dim), PADDED_VALUE_DIM=triton.next_power_of_2(value_dim),
        LARGEST=LARGEST_CODE[key_cache.dtype], IS_E4M3=key_cache.dtype == torch.float8_e4m3fn,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
