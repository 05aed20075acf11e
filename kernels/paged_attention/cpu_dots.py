"""CPU attention in pairs of bf16, compiled: scores and weighted values. Needs AVX512-BF16, which the caller checks.

A score is a chain of `dot_pairs` over the head's dimensions, in fp32, and is scaled afterwards. Weights are rounded to
bf16, as in transformers; the norm adds the rounded ones, so a row's output is a mean of values. Pairs of positions
begin at even places of a tile. Of a pair that a row sees one half of, the other half of the values is masked: nothing
outside a row's range takes part, whatever is stored there.
"""

from __future__ import annotations

from numba import njit, types

from outrider.kernels.cpu.emitters import (
    I32,
    LANES,
    VECTOR_BYTES,
    VF32,
    VI16,
    VI32,
    Builder,
    Value,
    dot_pairs,
    has_dot_pairs,
    ints,
    load,
    splat,
    store,
)
from outrider.kernels.cpu.panel import make_panel, make_row_sums
from outrider.kernels.cpu.simd import Vec16, operation
from outrider.kernels.paged_attention.cpu_loading import TILE, TILE_BYTES

DOTTED_DIMS = 2 * LANES  # least dimensions of a head: one vector of bf16
ROW_BLOCK = 4  # most packed rows of a panel
_FIRST, _SECOND = 0xFFFF, -0x10000  # masks of the two bf16 of a pair
_i, _v = types.int64, Vec16()

score_pairs = make_panel(ROW_BLOCK, TILE // LANES, accumulate=False, of_pairs=True)
_add_weighted = make_row_sums(ROW_BLOCK, of_pairs=True)


@operation(types.void, _i, _v)
def vstore_upper(builder: Builder, address: Value, value: Value) -> None:
    """Stores 16 floats that are bf16 numbers as such."""
    upper = builder.lshr(builder.bitcast(value, VI32), ints(16))
    store(builder, builder.trunc(upper, VI16), address, 2)


@operation(types.void, _i, _i, _i, _i)
def _add_half(builder: Builder, pair: Value, line: Value, mask: Value, sums: Value) -> None:
    """sums[0..16) += one of a pair of weights times its values."""
    if not has_dot_pairs():
        return
    weights = splat(builder, load(builder, pair, I32, 4))
    values = builder.and_(load(builder, line, VI32, 4), splat(builder, builder.trunc(mask, I32)))
    store(builder, dot_pairs(builder, load(builder, sums, VF32, 4), weights, values), sums, 4)


@njit
def _add_one(weights, values, stride, sums, place, mask):  # type: ignore[no-untyped-def]
    """sums[0] += weights[0, place] * values[place]."""
    for column in range(0, stride, VECTOR_BYTES):
        _add_half(weights + 4 * (place // 2), values + place // 2 * stride + column, mask, sums + column)


@njit
def add_value_pairs(num_rows, weights, values, stride, sums, sums_stride, first, last):  # type: ignore[no-untyped-def]
    """sums += weights[:, first:last] @ values[first:last]; several rows only where first and last are even."""
    if first % 2 == 1:
        _add_one(weights, values, stride, sums, first, _SECOND)
        first += 1
    _add_weighted(num_rows, weights, TILE_BYTES, values, stride, sums, sums_stride, first // 2, last // 2)
    if last % 2 == 1:
        _add_one(weights, values, stride, sums, last - 1, _FIRST)
