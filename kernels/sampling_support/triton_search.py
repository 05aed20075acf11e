"""Device functions: passes of one program over an array of logits, and the search for a border in it.

A border is the smallest key above which less than a limit weighs: top-k has weights 1 and limit top_k, top-p softmax
weights and limit top_p * mass. Sums have a fixed order: per lane over the tiles in float32 (exact for counts), then
over the lanes in float64. Rounding is monotone, so a set never weighs less than its subsets, and the search is
consistent. Loops are `while`: only there does triton's interpreter accept device scalars as bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.sampling_support.triton_tiles import keys_of, load_tile, log_weights_of


@triton.jit
def _fours(values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK / 4]: sums of four adjacent values of one lane; quarters the registers of accumulators."""
    return tl.sum(tl.reshape(values, [BLOCK // 4, 4]), axis=1)


@triton.jit
def largest(row_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32: the largest value, -inf if none."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        best = tl.maximum(best, load_tile(row_ptr, start + tl.arange(0, BLOCK), count))
        start += BLOCK
    return tl.max(best, axis=0)


@triton.jit
def measure(row_ptr, count, key, top, scale, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """float64 scalars: the number of values above `key`, at `key`, and the mass above it."""
    above = tl.zeros([BLOCK // 4], tl.float32)
    at = tl.zeros([BLOCK // 4], tl.float32)
    mass = tl.zeros([BLOCK // 4], tl.float32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        values = load_tile(row_ptr, start + tl.arange(0, BLOCK), count)
        keys = keys_of(values, KEY_SHIFT)
        above += _fours(tl.where(keys > key, 1.0, 0.0), BLOCK)
        at += _fours(tl.where(keys == key, 1.0, 0.0), BLOCK)
        mass += _fours(tl.where(keys > key, tl.exp(log_weights_of(values, top, scale)), 0.0), BLOCK)
        start += BLOCK
    return tl.sum(above.to(tl.float64)), tl.sum(at.to(tl.float64)), tl.sum(mass.to(tl.float64))


@triton.jit
def survey(row_ptr, count, key1, key2, key3, key4, top, scale, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """float64 scalars, in one pass: the numbers of values above four keys, and the mass of all."""
    above1 = tl.zeros([BLOCK // 4], tl.float32)
    above2 = tl.zeros([BLOCK // 4], tl.float32)
    above3 = tl.zeros([BLOCK // 4], tl.float32)
    above4 = tl.zeros([BLOCK // 4], tl.float32)
    mass = tl.zeros([BLOCK // 4], tl.float32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        values = load_tile(row_ptr, start + tl.arange(0, BLOCK), count)
        keys = keys_of(values, KEY_SHIFT)
        above1 += _fours(tl.where(keys > key1, 1.0, 0.0), BLOCK)
        above2 += _fours(tl.where(keys > key2, 1.0, 0.0), BLOCK)
        above3 += _fours(tl.where(keys > key3, 1.0, 0.0), BLOCK)
        above4 += _fours(tl.where(keys > key4, 1.0, 0.0), BLOCK)
        mass += _fours(tl.where(values > -float("inf"), tl.exp(log_weights_of(values, top, scale)), 0.0), BLOCK)
        start += BLOCK
    return (
        tl.sum(above1.to(tl.float64)),
        tl.sum(above2.to(tl.float64)),
        tl.sum(above3.to(tl.float64)),
        tl.sum(above4.to(tl.float64)),
        tl.sum(mass.to(tl.float64)),
    )


@triton.jit
def gather_above(row_ptr, count, key, target_ptr, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the values above `key` to target_ptr, in order of id."""
    filled = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        values = load_tile(row_ptr, start + tl.arange(0, BLOCK), count)
        chosen = keys_of(values, KEY_SHIFT) > key
        places = filled + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(target_ptr + places, values.to(target_ptr.dtype.element_ty), mask=chosen)
        filled += tl.sum(chosen.to(tl.int32), axis=0)
        start += BLOCK
    # Other threads of the program read these values.
    tl.debug_barrier()


@triton.jit
def border_key(  # type: ignore[no-untyped-def]
    row_ptr,
    count,
    low,
    high,
    limit,
    top,
    scale,
    BY_MASS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """int64: the smallest key in (low, high] above which less than `limit` weighs, true of `high` (int64 bounds).

    Each pass cuts the range to an eighth."""
    while high - low > 1:
        span = high - low
        k1 = low + span // 8
        k2 = low + span * 2 // 8
        k3 = low + span * 3 // 8
        k4 = low + span * 4 // 8
        k5 = low + span * 5 // 8
        k6 = low + span * 6 // 8
        k7 = low + span * 7 // 8
        s1, s2, s3, s4, s5, s6, s7 = _weights_above(
            row_ptr, count, k1, k2, k3, k4, k5, k6, k7, top, scale, BY_MASS, KEY_SHIFT, BLOCK
        )
        # The first keys of a narrow range equal `low`, known to be too low.
        low = tl.where((s1 >= limit) & (k1 > low), k1, low)
        low = tl.where((s2 >= limit) & (k2 > low), k2, low)
        low = tl.where((s3 >= limit) & (k3 > low), k3, low)
        low = tl.where((s4 >= limit) & (k4 > low), k4, low)
        low = tl.where((s5 >= limit) & (k5 > low), k5, low)
        low = tl.where((s6 >= limit) & (k6 > low), k6, low)
        low = tl.where((s7 >= limit) & (k7 > low), k7, low)
        high = tl.where((s7 < limit) & (k7 > low), k7, high)
        high = tl.where((s6 < limit) & (k6 > low), k6, high)
        high = tl.where((s5 < limit) & (k5 > low), k5, high)
        high = tl.where((s4 < limit) & (k4 > low), k4, high)
        high = tl.where((s3 < limit) & (k3 > low), k3, high)
        high = tl.where((s2 < limit) & (k2 > low), k2, high)
        high = tl.where((s1 < limit) & (k1 > low), k1, high)
    return high


@triton.jit
def _weights_above(  # type: ignore[no-untyped-def]
    row_ptr,
    count,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    top,
    scale,
    BY_MASS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Seven float64 scalars: the weight above each key."""
    a1 = tl.zeros([BLOCK // 4], tl.float32)
    a2 = tl.zeros([BLOCK // 4], tl.float32)
    a3 = tl.zeros([BLOCK // 4], tl.float32)
    a4 = tl.zeros([BLOCK // 4], tl.float32)
    a5 = tl.zeros([BLOCK // 4], tl.float32)
    a6 = tl.zeros([BLOCK // 4], tl.float32)
    a7 = tl.zeros([BLOCK // 4], tl.float32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        values = load_tile(row_ptr, start + tl.arange(0, BLOCK), count)
        keys = keys_of(values, KEY_SHIFT)
        weights = tl.full([BLOCK], 1.0, tl.float32)
        if BY_MASS:
            weights = tl.exp(log_weights_of(values, top, scale))
        a1 += _fours(tl.where(keys > k1.to(tl.int32), weights, 0.0), BLOCK)
        a2 += _fours(tl.where(keys > k2.to(tl.int32), weights, 0.0), BLOCK)
        a3 += _fours(tl.where(keys > k3.to(tl.int32), weights, 0.0), BLOCK)
        a4 += _fours(tl.where(keys > k4.to(tl.int32), weights, 0.0), BLOCK)
        a5 += _fours(tl.where(keys > k5.to(tl.int32), weights, 0.0), BLOCK)
        a6 += _fours(tl.where(keys > k6.to(tl.int32), weights, 0.0), BLOCK)
        a7 += _fours(tl.where(keys > k7.to(tl.int32), weights, 0.0), BLOCK)
        start += BLOCK
    return (
        tl.sum(a1.to(tl.float64)),
        tl.sum(a2.to(tl.float64)),
        tl.sum(a3.to(tl.float64)),
        tl.sum(a4.to(tl.float64)),
        tl.sum(a5.to(tl.float64)),
        tl.sum(a6.to(tl.float64)),
        tl.sum(a7.to(tl.float64)),
    )


@triton.jit
def border_id(row_ptr, count, key, num_kept, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32: the id of the num_kept-th value at `key`."""
    found = tl.full([], 0x7FFFFFFF, tl.int32)
    passed = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        ids = start + tl.arange(0, BLOCK)
        at = keys_of(load_tile(row_ptr, ids, count), KEY_SHIFT) == key
        places = passed + tl.cumsum(at.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(at & (places == num_kept), ids, 0x7FFFFFFF), axis=0))
        passed += tl.sum(at.to(tl.int32), axis=0)
        start += BLOCK
    return found
