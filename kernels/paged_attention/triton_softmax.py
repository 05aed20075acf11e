"""The arithmetic of a row in GPU attention: online softmax over a block, merging two states, normalisation.

Not here: which positions a row sees and where they lie (`triton_splits`). Base 2: scores carry log2(e). A state is
(maximum, norm, sums): the largest score, the sum of exp2(score - maximum), and the values weighted by it. The empty
state is (-inf, 0, 0); merging it changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton_numbers import INTERPRETED, dot_in_fp32, round_to


@triton.jit
def _attend_block(  # type: ignore[no-untyped-def]
    maximum, norm, sums, query, key, value, key_scale, value_scale, rest_query, rest_key, visible,
    score_scale, score_cap,
    HAS_SOFTCAP: tl.constexpr, HAS_REST: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. query [M, D], key [N, D], value [N, Dv], visible [M, N]; rest_query and rest_key:
    further elements of both, if HAS_REST.

    Of codes, key_scale [N] multiplies the scores, value_scale [N] the weights after the norm has added them.
    """
    scores = dot_in_fp32(query, tl.trans(key), tl.zeros([query.shape[0], key.shape[0]], tl.float32))
    if HAS_REST:
        scores = dot_in_fp32(rest_query, tl.trans(rest_key), scores)
    if CODES:
        scores = scores * key_scale[None, :]
    scores = scores * score_scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); exp(2x) may be inf or 0.
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * score_cap
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    decay, pivot = _decay(maximum, new_maximum)
    weights = tl.exp2(scores - pivot[:, None])
    norm = norm * decay + tl.sum(weights, 1)
    if CODES:
        weights = weights * value_scale[None, :]
    sums = dot_in_fp32(round_to(weights, value.dtype), value, sums * decay[:, None])
    return new_maximum, norm, sums


@triton.jit
def _decay(maximum, new_maximum):  # type: ignore[no-untyped-def]
    """exp2(maximum - new_maximum), exactly 1 where they are equal; and new_maximum, or 0 where it is -inf."""
    pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return tl.where(maximum == new_maximum, 1.0, tl.exp2(maximum - pivot)), pivot


@triton.jit
def _fold(maximum, norm, sums, part_maximum, part_norm, part_sums):  # type: ignore[no-untyped-def]
    """Merge another split's state, for rows [M] and sums [M, Dv]. Splits are merged in ascending order."""
    new_maximum = tl.maximum(maximum, part_maximum)
    decay, _ = _decay(maximum, new_maximum)
    weight, _ = _decay(part_maximum, new_maximum)
    norm = norm * decay + part_norm * weight
    sums = sums * decay[:, None] + part_sums * weight[:, None]
    return new_maximum, norm, sums


@triton.jit
def _finish(maximum, norm, sums, sinks, head, is_row, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The output [M, Dv] of a state; head [M]. + 0.0: merging an empty state turns -0 into +0, so always do it."""
    sums = sums + 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        final = tl.maximum(maximum, sink)
        decay, pivot = _decay(maximum, final)
        norm = norm * decay + tl.exp2(sink - pivot)
        sums = sums * decay[:, None]
    return sums / tl.where(is_row, norm, 1.0)[:, None]


@triton.jit
def _first_seen(position, window_reach, window_step):  # type: ignore[no-untyped-def]
    """The first logical position that a row at `position` sees, as in `arguments.Scoring.window`; ascends with it."""
    return tl.maximum(position + 1 - window_reach, 0) // window_step * window_step


@triton.jit
def _bound(number):  # type: ignore[no-untyped-def]
    """A loop bound. The interpreter holds it in an array, which numpy 2.4 does not accept as a number."""
    if INTERPRETED:
        return (number + tl.zeros([1], tl.int32)).handle.data.item()
    else:
        return number


@triton.jit
def _count_starts(query_starts, num_entries, limit, ROWS: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of s < num_entries with query_starts[s] // ROWS + STEP * s <= limit; the left side ascends with s.

    One wide load per 128 sessions; a binary search would wait for memory at each level.
    """
    count = 0
    for base in range(0, _bound(num_entries), 128):
        entry = base + tl.arange(0, 128)
        start = tl.load(query_starts + entry, mask=entry < num_entries, other=0)
        counted = (entry < num_entries) & (start // ROWS + STEP * entry <= limit)
        count += tl.sum(counted.to(tl.int32), 0)
    return count
