"""The two block operations of CPU attention: multiply-accumulate and transposing load. Needs numba."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def make_panel(
    max_rows: int, num_vectors: int, *, accumulate: bool, of_pairs: bool = False, is_listed: bool = False
) -> Any:
    """C[r, :] (+)= sum over j in [j_begin, j_end) of A[r, j] * B[j, :], strides in bytes.

    num_rows: 1 to max_rows, rows of A and C. B and C: 16 * num_vectors columns; C fp32, A and B too. of_pairs: A and B
    hold pairs of bf16 in 32 bits, multiplied by `dot_pairs`. is_listed: B's rows are bf16 and lie anywhere; at b are
    their addresses, and b_stride is added to each. Each element of C is one chain of additions in ascending j, so
    panels of different heights give the same bits. of_pairs does nothing on a CPU without AVX512-BF16.
    """
    element, vector = (I32, VI32) if of_pairs else (F32, VF32)

    def multiply_add(builder: Builder, factor: Value, column: Value, total: Value) -> Value:
        return dot_pairs(builder, total, factor, column) if of_pairs else fma(builder, factor, column, total)

    def column_of(builder: Builder, b: Value, b_stride: Value, j: Value, v: int) -> Value:
        if is_listed:
            row = builder.add(load(builder, offset(builder, b, 8, j), I64, 8), b_stride)
            return widen_bf16(builder, load(builder, offset(builder, row, VECTOR_BYTES // 2, v), VI16, 2))
        return load(builder, offset(builder, offset(builder, b, b_stride, j), VECTOR_BYTES, v), vector, 4)

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
        starts = [offset(builder, a, a_stride, r) for r in range(num_rows)]
        for rows, vectors in _cuts(num_rows, num_vectors):
            cells = [(r, v) for r in rows for v in vectors]
            places = {(r, v): offset(builder, offset(builder, c, c_stride, r), VECTOR_BYTES, v) for r, v in cells}
            sums = {cell: cgutils.alloca_once(builder, VF32) for cell in cells}
            for cell in cells:
                builder.store(load(builder, places[cell], VF32, 4) if accumulate else floats(0.0), sums[cell])
            with cgutils.for_range_slice(builder, j_begin, j_end, ir.Constant(I64, 1), I64) as (j, _count):
                columns = {v: column_of(builder, b, b_stride, j, v) for v in vectors}
                for r in rows:
                    factor = splat(builder, load(builder, offset(builder, starts[r], 4, j), element, 4))
                    for v in vectors:
                        total = sums[r, v]
                        builder.store(multiply_add(builder, factor, columns[v], builder.load(total)), total)
            for cell in cells:
                store(builder, builder.load(sums[cell]), places[cell], 4)

    return panel


def _cuts(num_rows: int, num_vectors: int) -> Iterator[tuple[range, range]]:
    """Cuts a panel's sums, rows by vectors, into those that registers hold at once.

    With 16 registers of eight floats those are four vectors of one row, two each of two rows, or one each of four. They
    are eight chains of FMAs, which keep two units with a latency of four cycles busy. Larger cuts would not fit.
    """
    start = 0
    while start < num_rows:
        size = num_rows if has_wide_registers() else next(size for size in (4, 2, 1) if size <= num_rows - start)
        at_once = num_vectors if has_wide_registers() else min(4 // size, num_vectors)
        for first in range(0, num_vectors, at_once):
            yield range(start, start + size), range(first, first + at_once)
        start += size


def make_row_sums(max_rows: int, *, of_pairs: bool = False, is_listed: bool = False) -> Any:
    """Makes a panel like make_panel's with accumulate, of as many columns as fit in `width` bytes of a row of C.

    Where B's rows are not listed, width is their stride too.
    """
    four, one = (make_panel(max_rows, num, accumulate=True, of_pairs=of_pairs, is_listed=is_listed) for num in (4, 1))

    @njit
    def add(num_rows, a, a_stride, b, width, c, c_stride, j_begin, j_end):  # type: ignore[no-untyped-def]
        column = 0
        while column < width:
            rows, stride = (b, column // 2) if is_listed else (b + column, width)
            if column + 4 * VECTOR_BYTES <= width:
                four(num_rows, a, a_stride, rows, stride, c + column, c_stride, j_begin, j_end)
                column += 4 * VECTOR_BYTES
            else:
                one(num_rows, a, a_stride, rows, stride, c + column, c_stride, j_begin, j_end)
                column += VECTOR_BYTES

    return add


def _interleave(builder: Builder, left: Value, right: Value, within: list[int]) -> Value:
    """Applies one shuffle to each group of 4 lanes; entries 4..7 of `within` select lanes of right."""
    num_lanes = left.type.count
    lanes = [start + w % 4 + (num_lanes if w >= 4 else 0) for start in range(0, num_lanes, 4) for w in within]
    return shuffle(builder, left, right, lanes)


def _blocks(builder: Builder, left: Value, right: Value, groups: Sequence[int]) -> Value:
    """The given groups of 4 lanes of left, then those of right."""
    starts = [side + 4 * group for side in (0, left.type.count) for group in groups]
    return shuffle(builder, left, right, [start + lane for start in starts for lane in range(4)])


def transpose(builder: Builder, rows: list[Value]) -> list[Value]:
    """A square of 16 or 8 rows to columns: 64 or 24 shuffles, each one instruction where a register holds a row."""
    pairs = []
    for i in range(0, len(rows), 2):
        pairs.append(_interleave(builder, rows[i], rows[i + 1], [0, 4, 1, 5]))
        pairs.append(_interleave(builder, rows[i], rows[i + 1], [2, 6, 3, 7]))
    quads = []  # quads[4 * g + c]: lanes 4k..4k+3 hold column 4k+c of rows 4g..4g+3
    for g in range(0, len(rows), 4):
        for half in (0, 1):
            quads.append(_interleave(builder, pairs[g + half], pairs[g + half + 2], [0, 1, 4, 5]))
            quads.append(_interleave(builder, pairs[g + half], pairs[g + half + 2], [2, 3, 6, 7]))
    columns: list[Value] = [None] * len(rows)
    for c in range(4):
        if len(rows) == 8:
            columns[c], columns[4 + c] = (_blocks(builder, quads[c], quads[4 + c], [k]) for k in (0, 1))
            continue
        for k in (0, 2):
            upper = _blocks(builder, quads[c], quads[4 + c], [k, k + 1])
            lower = _blocks(builder, quads[8 + c], quads[12 + c], [k, k + 1])
            columns[4 * k + c] = _blocks(builder, upper, lower, [0, 2])
            columns[4 * (k + 1) + c] = _blocks(builder, upper, lower, [1, 3])
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
        # Squares of as many rows and lanes as registers hold. Lanes beyond them are never stored, so never computed.
        size = LANES if has_wide_registers() else LANES // 2
        for lane in range(0, LANES, size):
            for first in range(0, LANES, size):
                vectors = [load_vector(builder, builder.add(s, skip_bytes)) for s in starts[first : first + size]]
                rows = [shuffle(builder, vector, vector, range(lane, lane + size)) for vector in vectors]
                columns = transpose(builder, rows)
                for c, column in enumerate(columns):
                    whole = shuffle(builder, column, column, [i % size for i in range(LANES)])
                    parts = parts_of(builder, whole)
                    for i, part in enumerate(parts):
                        place = offset(builder, target, target_stride, (lane + c) * len(parts) + i)
                        store(builder, shuffle(builder, part, part, range(size)), offset(builder, place, 4, first), 4)

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
