"""The two block operations of CPU attention: multiply-accumulate and transposing load. Needs numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from outrider.kernels.cpu.emitters import (
    LANES,
    VECTOR_BYTES,
    Builder,
    Value,
    floats,
    fma,
    ints,
    load,
    offset,
    shuffle,
    splat,
    store,
    widen_bf16,
)
from outrider.kernels.cpu.simd import operation

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VF32, _VI16, _VI32 = (ir.VectorType(element, LANES) for element in (_F32, ir.IntType(16), ir.IntType(32)))
_i = types.int64


def make_panel(num_rows: int, num_vectors: int, *, accumulate: bool) -> Any:
    """C[r, :] (+)= sum over j in [j_begin, j_end) of A[r, j] * B[j, :], all fp32, strides in bytes.

    A, C: num_rows rows; B, C: 16 * num_vectors columns. Each element of C is one chain of fused multiply-adds in
    ascending j, so panels of different heights give the same bits.
    """

    @operation(types.void, _i, _i, _i, _i, _i, _i, _i, _i)
    def panel(
        builder: Builder,
        a: Value,
        a_stride: Value,
        b: Value,
        b_stride: Value,
        c: Value,
        c_stride: Value,
        j_begin: Value,
        j_end: Value,
    ) -> None:
        cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        rows = [offset(builder, a, a_stride, r) for r in range(num_rows)]
        places = {(r, v): offset(builder, offset(builder, c, c_stride, r), VECTOR_BYTES, v) for r, v in cells}
        sums = {cell: cgutils.alloca_once(builder, _VF32) for cell in cells}
        for cell in cells:
            builder.store(load(builder, places[cell], _VF32, 4) if accumulate else floats(0.0), sums[cell])
        with cgutils.for_range_slice(builder, j_begin, j_end, ir.Constant(_I64, 1), _I64) as (j, _count):
            line = offset(builder, b, b_stride, j)
            columns = [load(builder, offset(builder, line, VECTOR_BYTES, v), _VF32, 4) for v in range(num_vectors)]
            for r in range(num_rows):
                factor = splat(builder, load(builder, offset(builder, rows[r], 4, j), _F32, 4))
                for v in range(num_vectors):
                    total = sums[r, v]
                    builder.store(fma(builder, factor, columns[v], builder.load(total)), total)
        for cell in cells:
            store(builder, builder.load(sums[cell]), places[cell], 4)

    return panel


def _interleave(builder: Builder, left: Value, right: Value, within: list[int]) -> Value:
    """Applies one shuffle to each group of 4 lanes; entries 4..7 of `within` select lanes of right."""
    lanes = [4 * block + w % 4 + (LANES if w >= 4 else 0) for block in range(4) for w in within]
    return shuffle(builder, left, right, lanes)


def _blocks(builder: Builder, left: Value, right: Value, first: int, second: int) -> Value:
    """Groups of 4 lanes: first and second of left, then first and second of right."""
    starts = [4 * first, 4 * second, LANES + 4 * first, LANES + 4 * second]
    return shuffle(builder, left, right, [start + lane for start in starts for lane in range(4)])


def transpose(builder: Builder, rows: list[Value]) -> list[Value]:
    """16 rows of 16 lanes to 16 columns; 64 shuffles, one instruction each with AVX-512."""
    pairs = []
    for i in range(0, LANES, 2):
        pairs.append(_interleave(builder, rows[i], rows[i + 1], [0, 4, 1, 5]))
        pairs.append(_interleave(builder, rows[i], rows[i + 1], [2, 6, 3, 7]))
    quads = []  # quads[4 * g + c]: lanes 4k..4k+3 hold column 4k+c of rows 4g..4g+3
    for g in range(0, LANES, 4):
        for half in (0, 1):
            quads.append(_interleave(builder, pairs[g + half], pairs[g + half + 2], [0, 1, 4, 5]))
            quads.append(_interleave(builder, pairs[g + half], pairs[g + half + 2], [2, 3, 6, 7]))
    columns: list[Value] = [None] * LANES
    for c in range(4):
        for k in (0, 2):
            upper = _blocks(builder, quads[c], quads[4 + c], k, k + 1)
            lower = _blocks(builder, quads[8 + c], quads[12 + c], k, k + 1)
            columns[4 * k + c] = _blocks(builder, upper, lower, 0, 2)
            columns[4 * (k + 1) + c] = _blocks(builder, upper, lower, 1, 3)
    return columns


def make_transposing_load(
    load_vector: Callable[[Builder, Value], Value],
    parts_of: Callable[[Builder, Value], list[Value]] = lambda _builder, column: [column],
) -> Any:
    """target[i, 0..16) = element i of the 16 vectors whose addresses are listed at `addresses`.

    skip_bytes is added to each address; target_stride: bytes between rows of the target. Where elements are narrower
    than the 32 bits that are transposed, `parts_of` splits or widens a column: it becomes as many rows of the target.
    """

    @operation(types.void, _i, _i, _i, _i)
    def transposing_load(
        builder: Builder, addresses: Value, skip_bytes: Value, target: Value, target_stride: Value
    ) -> None:
        starts = [load(builder, offset(builder, addresses, 8, i), _I64, 8) for i in range(LANES)]
        columns = transpose(builder, [load_vector(builder, builder.add(s, skip_bytes)) for s in starts])
        rows = (part for column in columns for part in parts_of(builder, column))  # one at a time
        for i, row in enumerate(rows):
            store(builder, row, offset(builder, target, target_stride, i), 4)

    return transposing_load


def _halves(builder: Builder, pair: Value) -> list[Value]:
    """Two bf16 of each lane, the lower first, as fp32."""
    even, odd = builder.shl(pair, ints(16)), builder.and_(pair, ints(-(1 << 16)))
    return [builder.bitcast(bits, _VF32) for bits in (even, odd)]


transposing_load_f32 = make_transposing_load(lambda b, address: load(b, address, _VF32, 4))
transposing_load_bf16 = make_transposing_load(lambda b, address: widen_bf16(b, load(b, address, _VI16, 2)))
# of 32 elements of each vector, transposed as pairs: half of the shuffles
transposing_load_bf16_pairs = make_transposing_load(lambda b, address: load(b, address, _VI32, 2), _halves)
