"""Second kernel of GPU attention: merges a row's splits in ascending order, adds sinks, rounds the output once.

Same `_fold` as the fused path of `triton_splits`, without contracted multiply-adds: the bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.paged_attention.triton_softmax import (
    _bound,
    _count_starts,
    _finish,
    _first_seen,
    _fold,
)
from outrider.kernels.triton_numbers import round_to


@triton.jit(do_not_specialize=["num_sessions", "num_splits"])
def combine_splits(  # type: ignore[no-untyped-def]
    part_sums, part_states, out, sinks, context_lens, query_starts, tree_starts,
    num_sessions, num_splits, num_heads, window_reach, window_step,
    SPLIT: tl.constexpr, UNROLL: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (T, Hq): one program per row and query head."""
    index = tl.program_id(0)
    session = _count_starts(query_starts, num_sessions + 1, index, 1, 0) - 1
    if session >= num_sessions:
        return
    row = index - tl.load(query_starts + session)
    context = tl.load(context_lens + session)
    first = 0
    if HAS_WINDOW:
        # A lower bound: a tree row's logical position is at least that of tree_start.
        logical = context + tl.minimum(row, tl.load(tree_starts + session))
        first = _first_seen(logical, window_reach, window_step) // SPLIT
    end = (context + row) // SPLIT + 1

    one = tl.arange(0, 1)
    head = tl.program_id(1) + one
    dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    out_row = index.to(tl.int64) * num_heads + head
    maximum = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, PADDED_VALUE_DIM], tl.float32)
    for base in range(_bound(first), _bound(end), UNROLL):
        # Unrolled, so that the loads overlap.
        for offset in tl.static_range(UNROLL):
            split = base + offset
            place = out_row * num_splits + split
            has_split = split + one < end
            part_maximum = tl.load(part_states + place * 2, mask=has_split, other=float("-inf"))
            part_norm = tl.load(part_states + place * 2 + 1, mask=has_split, other=0.0)
            is_part = has_split[:, None] & (dim < VALUE_DIM)
            part = tl.load(part_sums + place[:, None] * VALUE_DIM + dim, mask=is_part, other=0.0)
            maximum, norm, sums = _fold(maximum, norm, sums, part_maximum, part_norm, part)
    result = _finish(maximum, norm, sums, sinks, head, one == 0, HAS_SINKS)
    tl.store(out + out_row[:, None] * VALUE_DIM + dim, round_to(result, out.dtype.element_ty), mask=dim < VALUE_DIM)
