"""The two block operations of CPU attention: multiply-accumulate and transposing load. Needs numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from outrider.kernels.cpu.emitters import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    VF32,
    VI16,
    VI32,
    Builder,
    Value,
    dot_pairs,
    floats,
    fma,
    halves_of_pairs,
    has_dot_pairs,
    has_wide_registers,
    ints,
    load,
    offset,
    shuffle,
    splat,
    store,
    widen_bf16,
)
from outrider.kernels.cpu.simd import for_each, operation

_i = types.int64


def make_panel(max_rows: int, num_vectors: int, *, accumulate: bool, of_pairs: bool = False) -> Any:
    """C[r, :] (+)= sum over j in [j_begin, j_end) of A[r, j] * B[j, :], strides in bytes.

    num_rows: 1 to max_rows, rows of A and C. B and C: 16 * num_vectors columns; C fp32, A and B too. of_pairs: A and B
    hold pairs of bf16 in 32 bits, multiplied by `dot_pairs`. Each element of C is one chain of additions in ascending
    j, so panels of different heights give the same bits. of_pairs does nothing on a CPU without AVX512-BF16.
    """
    element, vector = (I32, VI32) if of_pairs else (F32, VF32)

    def multiply_add(builder: Builder, factor: Value, column: Value, total: Value) -> Value:
        return dot_pairs(builder, total, factor, column) if of_pairs else fma(builder, factor, column, total)

    @operation(types.void, *[_i] * 9)
    @for_each(range(1, max_rows + 1))
    def panel(
        builder: Builder,
        num_rows: int,
        a: Value,
        a_stride: Value,
        b: Value,
        b_stride: Value,
        c: Value,
        c_stride: Value,
        j_begin: Value,
        j_end: Value,
    ) -> None:
        if of_pairs and not has_dot_pairs():
            return
        rows = [offset(builder, a, a_stride, r) for r in range(num_rows)]
        # With 16 registers of eight floats: the sums of one row, else of one vector of columns.
        at_once = num_vectors if has_wide_registers() or num_rows == 1 else 1
        for first in range(0, num_vectors, at_once):
            vectors = range(first, first + at_once)
            cells = [(r, v) for r in range(num_rows) for v in vectors]
            places = {(r, v): offset(builder, offset(builder, c, c_stride, r), VECTOR_BYTES, v) for r, v in cells}
            sums = {cell: cgutils.alloca_once(builder, VF32) for cell in cells}
            for cell in cells:
                builder.store(load(builder, places[cell], VF32, 4) if accumulate else floats(0.0), sums[cell])
            with cgutils.for_range_slice(builder, j_begin, j_end, ir.Constant(I64, 1), I64) as (j, _count):
                line = offset(builder, b, b_stride, j)
                columns = {v: load(builder, offset(builder, line, VECTOR_BYTES, v), vector, 4) for v in vectors}
                for r in range(num_rows):
                    factor = splat(builder, load(builder, offset(builder, rows[r], 4, j), element, 4))
                    for v in vectors:
                        total = sums[r, v]
                        builder.store(multiply_add(builder, factor, columns[v], builder.load(total)), total)
            for cell in cells:
                store(builder, builder.load(sums[cell]), places[cell], 4)

    return panel


def make_row_sums(max_rows: int, *, of_pairs: bool = False) -> Any:
    """Makes a panel like make_panel's with accumulate, of as many columns as b_stride has."""
    four, one = (make_panel(max_rows, num, accumulate=True, of_pairs=of_pairs) for num in (4, 1))

    @njit
    def add(num_rows, a, a_stride, b, b_stride, c, c_stride, j_begin, j_end):  # type: ignore[no-untyped-def]
        column = 0
        while column + 4 * VECTOR_BYTES <= b_stride:
            four(num_rows, a, a_stride, b + column, b_stride, c + column, c_stride, j_begin, j_end)
            column += 4 * VECTOR_BYTES
        while column < b_stride:
            one(num_rows, a, a_stride, b + column, b_stride, c + column, c_stride, j_begin, j_end)
            column += VECTOR_BYTES

    return add


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
    parts_of: Callable[[Builder, Value], Sequence[Value]] = lambda _builder, column: [column],
) -> Any:
    """target[i, 0..16) = element i of the 16 vectors whose addresses are listed at `addresses`.

    skip_bytes is added to each address; target_stride: bytes between rows of the target. Where elements are narrower
    than the 32 bits that are transposed, `parts_of` splits or widens a column: it becomes as many rows of the target.
    """

    @operation(types.void, _i, _i, _i, _i)
    def transposing_load(
        builder: Builder, addresses: Value, skip_bytes: Value, target: Value, target_stride: Value
    ) -> None:
        starts = [load(builder, offset(builder, addresses, 8, i), I64, 8) for i in range(LANES)]
        columns = transpose(builder, [load_vector(builder, builder.add(s, skip_bytes)) for s in starts])
        rows = (part for column in columns for part in parts_of(builder, column))  # one at a time
        for i, row in enumerate(rows):
            store(builder, row, offset(builder, target, target_stride, i), 4)

    return transposing_load


transposing_load_f32 = make_transposing_load(lambda b, address: load(b, address, VF32, 4))
transposing_load_bf16 = make_transposing_load(lambda b, address: widen_bf16(b, load(b, address, VI16, 2)))
transposing_load_words = make_transposing_load(lambda b, address: load(b, address, VI32, 2))
# of 32 elements of each vector, transposed as pairs: half of the shuffles
transposing_load_bf16_pairs = make_transposing_load(lambda b, address: load(b, address, VI32, 2), halves_of_pairs)


@operation(types.void, _i, _i, _i)
def store_pairs(builder: Builder, target: Value, first: Value, second: Value) -> None:
    """Stores 16 pairs of bf16, the lower of each from address first, the upper from second."""
    lower, upper = (builder.zext(load(builder, address, VI16, 2), VI32) for address in (first, second))
    store(builder, builder.or_(lower, builder.shl(upper, ints(16))), target, 4)
