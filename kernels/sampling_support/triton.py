"""The law of each row of logits after temperature, top-k, top-p and min-p, as four numbers per row.

A truncated law is a prefix of the row's order (larger logits first, ties by smaller id), given by its border: the key
of the last kept logit and the largest kept id among logits equal to it. No sort, no softmax in memory.

One program per row. Passes over memory:
* untruncated row: none, or two if its mass is wanted;
* truncated row: three: the largest logit; counts within 1.5, 4, 8 and 14 temperatures of it; a copy of the widest of
  these ranges that fits the scratch row (L1). The border is searched in the copy;
* one more if the border cuts through equal logits (common in bfloat16);
* nearly flat law, border outside the copy: the search reads the row itself, 11 times in float32, 6 in bfloat16.
256 rows of 131,072 float32 logits: 134 MB per pass, 40 us at 3.35 TB/s, 28 us at 4.8 TB/s; bfloat16 half.

Not here: drawing from the law (kernels/coupled_sample, kernels/rejection_sample).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.sampling_support.transforms import Transforms, check_logits
from outrider.kernels.sampling_support.triton_search import (
    border_id,
    border_key,
    gather_above,
    largest,
    measure,
    survey,
)
from outrider.kernels.sampling_support.triton_tiles import LOWEST_KEY, key_shift, keys_of, log_weights_of, value_of

_ROW_BLOCK = 8192  # logits per tile, 32 KiB in float32; 16 warps of 16 logits per lane
_SEARCH_BLOCK = 4096  # logits per tile of the copy
_NUM_WARPS = 16
SCRATCH_LEN = 8192  # logits of the copy


class RowLaws(NamedTuple):
    """The laws of rows: largest logit (float32), border key and id (int32), mass of the support (float64).

    Token j is kept if its key is above the border's, or equal with j <= border_id; its probability is
    exp((logit - largest) / temperature) / mass. Without `with_mass`, largest and mass are set for truncated rows only.
    `scales`: 1 / temperature, 0 for argmax.
    """

    largest: torch.Tensor
    border_keys: torch.Tensor
    border_ids: torch.Tensor
    masses: torch.Tensor
    scales: torch.Tensor


def row_laws(
    logits: torch.Tensor, transforms: Transforms, *, with_mass: bool, scratch_len: int = SCRATCH_LEN
) -> RowLaws:
    """`logits` [R, V]. `with_mass`: for rejection; argmax becomes a law with one token in its support.

    `scratch_len` affects speed, and at most the last bit of a mass. Raises KernelArgumentError.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    transforms.check(num_rows)
    device = logits.device
    laws = RowLaws(
        largest=torch.empty(num_rows, dtype=torch.float32, device=device),
        border_keys=torch.empty(num_rows, dtype=torch.int32, device=device),
        border_ids=torch.empty(num_rows, dtype=torch.int32, device=device),
        masses=torch.empty(num_rows, dtype=torch.float64, device=device),
        scales=torch.empty(num_rows, dtype=torch.float32, device=device),
    )
    scratch = torch.empty(num_rows, scratch_len, dtype=logits.dtype, device=device)
    block = max(16, triton.next_power_of_2(vocab_size))
    if num_rows:
        _row_law_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            *transforms,
            *laws,
            scratch,
            VOCAB_SIZE=vocab_size,
            SCRATCH_LEN=scratch_len,
            WITH_MASS=with_mass,
            KEY_SHIFT=key_shift(logits.dtype),
            BLOCK=min(_ROW_BLOCK, block),
            SEARCH_BLOCK=min(_SEARCH_BLOCK, block),
            num_warps=_NUM_WARPS,
        )
    return laws


@triton.jit
def _row_law_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    largest_ptr,
    border_keys_ptr,
    border_ids_ptr,
    masses_ptr,
    scales_ptr,
    scratch_ptr,
    VOCAB_SIZE: tl.constexpr,
    SCRATCH_LEN: tl.constexpr,
    WITH_MASS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperatures_ptr + row)
    greedy = temperature == 0.0
    scale = tl.where(greedy, 0.0, 1.0 / tl.where(greedy, 1.0, temperature))
    # Every truncated law holds the largest logit: argmax alone needs no truncation.
    top_k = tl.where(greedy, 1 if WITH_MASS else 0, tl.load(top_ks_ptr + row))
    top_p = tl.where(greedy, 1.0, tl.load(top_ps_ptr + row))
    min_p = tl.where(greedy, 0.0, tl.load(min_ps_ptr + row))
    needed = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if WITH_MASS:
        needed = needed | (temperature >= 0.0)
    # The key of -inf: keeps every finite logit.
    key = tl.full([], LOWEST_KEY >> KEY_SHIFT, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    top = tl.full([], -float("inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float64)
    if needed:
        top = largest(row_ptr, VOCAB_SIZE, BLOCK)
        if top > -float("inf"):
            key, last_id, mass = _border(
                row_ptr,
                scratch_ptr + row * SCRATCH_LEN,
                top,
                temperature,
                scale,
                top_k,
                top_p,
                min_p,
                VOCAB_SIZE,
                SCRATCH_LEN,
                KEY_SHIFT,
                BLOCK,
                SEARCH_BLOCK,
            )
    tl.store(largest_ptr + row, top)
    tl.store(border_keys_ptr + row, key)
    tl.store(border_ids_ptr + row, last_id)
    tl.store(masses_ptr + row, mass)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _border(  # type: ignore[no-untyped-def]
    row_ptr,
    scratch_ptr,
    top,
    temperature,
    scale,
    top_k,
    top_p,
    min_p,
    VOCAB_SIZE: tl.constexpr,
    SCRATCH_LEN: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """The border's key and id (int32), and the mass inside (float64)."""
    source_ptr, count, low, mass = _source(
        row_ptr,
        scratch_ptr,
        top,
        temperature,
        scale,
        top_k,
        top_p,
        VOCAB_SIZE,
        SCRATCH_LEN,
        KEY_SHIFT,
        BLOCK,
        SEARCH_BLOCK,
    )
    high = keys_of(top, KEY_SHIFT).to(tl.int64)
    key = low
    # Number of kept logits at the border key.
    num_kept = tl.full([], 0.0, tl.float64)
    if top_k > 0:
        key = border_key(source_ptr, count, low, high, top_k.to(tl.float64), top, scale, False, KEY_SHIFT, SEARCH_BLOCK)
        above, at, mass_above = measure(source_ptr, count, key.to(tl.int32), top, scale, KEY_SHIFT, SEARCH_BLOCK)
        num_kept = tl.minimum(top_k.to(tl.float64) - above, at)
        mass = mass_above + num_kept * _weight(key, top, scale, KEY_SHIFT)
    if top_p < 1.0:
        # The largest logit stays, whatever top_p.
        limit = tl.maximum(top_p.to(tl.float64) * mass, 1e-30)
        k_key = key
        low = tl.maximum(low, key - 1)
        key = border_key(source_ptr, count, low, high, limit, top, scale, True, KEY_SHIFT, SEARCH_BLOCK)
        above, at, mass_above = measure(source_ptr, count, key.to(tl.int32), top, scale, KEY_SHIFT, SEARCH_BLOCK)
        num_under_limit = tl.ceil((limit - mass_above) / tl.maximum(_weight(key, top, scale, KEY_SHIFT), 1e-30))
        most = tl.where((top_k > 0) & (key == k_key), num_kept, at)
        num_kept = tl.minimum(tl.maximum(num_under_limit, 1.0), most)
    if min_p > 0.0:
        min_key = _min_key(top, temperature, min_p, KEY_SHIFT)
        num_kept = tl.where(min_key > key, VOCAB_SIZE * 1.0, num_kept)
        key = tl.maximum(key, min_key)
    narrow_key = key.to(tl.int32)
    last_id = tl.full([], -1, tl.int32)
    if narrow_key > (LOWEST_KEY >> KEY_SHIFT):
        _, at, mass_above = measure(source_ptr, count, narrow_key, top, scale, KEY_SHIFT, SEARCH_BLOCK)
        mass = mass_above + tl.minimum(num_kept, at) * _weight(key, top, scale, KEY_SHIFT)
        last_id = tl.full([], VOCAB_SIZE, tl.int32)
        if num_kept < at:
            last_id = border_id(row_ptr, VOCAB_SIZE, narrow_key, num_kept.to(tl.int32), KEY_SHIFT, BLOCK)
    return narrow_key, last_id, mass


@triton.jit
def _source(  # type: ignore[no-untyped-def]
    row_ptr,
    scratch_ptr,
    top,
    temperature,
    scale,
    top_k,
    top_p,
    VOCAB_SIZE: tl.constexpr,
    SCRATCH_LEN: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """The logits to search (the row, or a copy of its head), their number, an int64 key below all of them, and the
    float64 mass of the whole row."""
    # 1.5: for rows as flat as random ones; 14: below it hardly any weight is left.
    key1 = keys_of(top - 1.5 * temperature, KEY_SHIFT) - 1
    key2 = keys_of(top - 4.0 * temperature, KEY_SHIFT) - 1
    key3 = keys_of(top - 8.0 * temperature, KEY_SHIFT) - 1
    key4 = keys_of(top - 14.0 * temperature, KEY_SHIFT) - 1
    count1, count2, count3, count4, mass = survey(
        row_ptr, VOCAB_SIZE, key1, key2, key3, key4, top, scale, KEY_SHIFT, BLOCK
    )
    floor = key1
    num_above = count1
    floor = tl.where(count2 <= SCRATCH_LEN, key2, floor)
    num_above = tl.where(count2 <= SCRATCH_LEN, count2, num_above)
    floor = tl.where(count3 <= SCRATCH_LEN, key3, floor)
    num_above = tl.where(count3 <= SCRATCH_LEN, count3, num_above)
    floor = tl.where(count4 <= SCRATCH_LEN, key4, floor)
    num_above = tl.where(count4 <= SCRATCH_LEN, count4, num_above)
    source_ptr = row_ptr
    count = tl.full([], VOCAB_SIZE, tl.int32)
    low = tl.full([], LOWEST_KEY >> KEY_SHIFT, tl.int64)
    if ((top_k > 0) | (top_p < 1.0)) & (num_above <= SCRATCH_LEN) & (num_above >= top_k):
        gather_above(row_ptr, VOCAB_SIZE, floor, scratch_ptr, KEY_SHIFT, BLOCK)
        num_copied = num_above.to(tl.int32)
        _, _, mass_copied = measure(scratch_ptr, num_copied, floor, top, scale, KEY_SHIFT, SEARCH_BLOCK)
        if (top_k > 0) | (mass_copied >= top_p.to(tl.float64) * mass):
            source_ptr = scratch_ptr
            count = num_copied
            low = floor.to(tl.int64)
    return source_ptr, count, low, mass


@triton.jit
def _weight(key, top, scale, KEY_SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float64: the weight of a logit at this int64 key."""
    value = value_of(key.to(tl.int32), KEY_SHIFT)
    return tl.where(value > -float("inf"), tl.exp(log_weights_of(value, top, scale)), 0.0).to(tl.float64)


@triton.jit
def _min_key(top, temperature, min_p, KEY_SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64: the smallest key with weight >= min_p."""
    border = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
    key = keys_of(border.to(tl.float32), KEY_SHIFT)
    below = value_of(key, KEY_SHIFT).to(tl.float64) < border
    return key.to(tl.int64) + below.to(tl.int64)
