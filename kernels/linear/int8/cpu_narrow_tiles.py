"""Linears in integers on CPUs with 16 registers of 32 bytes, compiled: up to six rows against 16 columns of a panel.

With AVX-VNNI `vpdpbusd` adds four products of bytes to each 32-bit lane. With AVX2 alone `vpmaddubsw` makes the sum of
two of them in 16 bits; while codes are small, the lines of a group are added there, and widened by `vpmaddwd` before
they could overflow. Codes of eight bits are multiplied by their magnitudes, with numbers of the row that take their
signs (`vpsignb`). The sums are the same integers in all cases.
Needs an instruction of cpu_lines.instruction (checked by the caller) and numba.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from outrider.kernels.cpu.emitters import (
    BYTES,
    LANES,
    VECTOR_BYTES,
    VF32,
    VI32,
    Builder,
    Value,
    call_on_registers,
    emit_prefetch,
    fma,
    hidden,
    load,
    offset,
    splat,
    store,
)
from outrider.kernels.cpu.simd import for_each, operation
from outrider.kernels.linear.cpu_code_tiles import load_factors
from outrider.kernels.linear.cpu_panel_coding import PANEL_COLUMNS
from outrider.kernels.linear.cpu_panel_tiles import ROW_BYTES
from outrider.kernels.linear.int8.cpu_lines import (
    GROUP_BYTES,
    I4,
    I5,
    I6,
    I8,
    LINE_BYTES,
    LOWEST_NUMBER,
    TABLE,
    LineDecoder,
    instruction,
    takes_whole_lines,
)
from outrider.kernels.linear.int8.reference import QUAD

# bytes; prefetch distance, as in cpu_tiles; 1024 to 4096 were not faster
_AHEAD_BYTES = 8192
# rows of one pass: their sums, a line and a quad fill 15 of 16 registers; of codes of eight bits, whose magnitudes take
# registers too, four rows
_MAX_ROWS, _MAX_ROWS_OF_BYTES = 6, 4
# number; a byte's distance from the signed code that it stands for, where bytes take the whole range
_UNSIGNED = -LOWEST_NUMBER
# kinds whose bytes take the whole range
_BYTE_KINDS = (I8, TABLE)
# lines whose products are added in 16 bits. Each adds at most 2 * 127 * its largest code, so 8 lines of codes below 16
# fit, 4 below 32 and 2 below 64; whole bytes are summed in 32 bits
_LINES_OF_WORDS = {I4: 8, I5: 4, I6: 2}
# lines of a group that are added without a loop: as published formats of this many bits have them, 32 inputs or 16
_LINES_AT_ONCE = {I4: 8, I5: 8, I6: 4, I8: 8, TABLE: 8}
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_WORDS = ir.VectorType(_I16, 32)
_DOT = "", "llvm.x86.avx512.vpdpbusd.256"
_SIGN = "", "llvm.x86.avx2.psign.b"
_ADD_BYTES, _ADD_WORDS = ("", "llvm.x86.avx2.pmadd.ub.sw"), ("", "llvm.x86.avx2.pmadd.wd")
_VECTORS = PANEL_COLUMNS // LANES
_ZERO, _ONE = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
_i = types.int64


@njit
def max_rows(kind):  # type: ignore[no-untyped-def]
    """Most rows of one pass."""
    return _MAX_ROWS_OF_BYTES if kind in _BYTE_KINDS else _MAX_ROWS


@operation(types.void, *[_i] * 19)
@for_each((I4, TABLE, I5, I6, I8), range(1, _MAX_ROWS + 1))
def add(
    builder: Builder,
    kind: int,
    num_rows: int,
    x: Value,
    x_stride: Value,
    x_groups: Value,
    x_groups_stride: Value,
    lines: Value,
    num_lines: Value,
    group_lines: Value,
    table: Value,
    base: Value,
    scales: Value,
    minimums: Value,
    scale_bytes: Value,
    scale_steps: Value,
    minimum_steps: Value,
    step_shift: Value,
    first_group: Value,
    totals: Value,
) -> None:
    """Add the groups of num_lines lines to totals[r, :]; the first line begins a group.

    A group's lines are read four times, by 16 columns after 16: from memory at first, so that all of its reads are
    spread over the products of four.
    """
    if takes_whole_lines() or num_rows > max_rows.py_func(kind):
        return
    decoder = LineDecoder(builder, kind, table)
    sums = [cgutils.alloca_once(builder, VI32) for _ in range(num_rows)]
    factor = cgutils.alloca_once(builder, VF32)
    begins = [cgutils.alloca_once(builder, _I32) for _ in range(num_rows)]
    rows = [offset(builder, x, x_stride, r) for r in range(num_rows)]
    groups = [offset(builder, x_groups, x_groups_stride, r) for r in range(num_rows)]
    base32 = builder.trunc(builder.add(base, ir.Constant(_I64, _UNSIGNED if _is_signed(kind) else 0)), _I32)
    num_groups = builder.sdiv(builder.sub(builder.add(num_lines, group_lines), _ONE), group_lines)
    with cgutils.for_range_slice(builder, _ZERO, num_groups, _ONE, _I64) as (group, _n):
        numbers = [offset(builder, groups[r], GROUP_BYTES, group) for r in range(num_rows)]
        first = builder.mul(group, group_lines)
        end = _smaller(builder, builder.add(first, group_lines), num_lines)
        step = builder.ashr(builder.add(first_group, group), step_shift)
        for number, begin in zip(numbers, begins, strict=True):
            builder.store(builder.mul(load(builder, offset(builder, number, 4, 1), _I32, 4), base32), begin)
        with cgutils.for_range_slice(builder, _ZERO, ir.Constant(_I64, _VECTORS), _ONE, _I64) as (vector, _m):
            _add_lines(builder, kind, decoder, vector, lines, rows, sums, first, end)
            column = builder.mul(vector, ir.Constant(_I64, LANES))
            skipped, of_steps = builder.mul(column, scale_bytes), builder.mul(column, ir.Constant(_I64, 2))
            places = [offset(builder, offset(builder, totals, ROW_BYTES, r), 4, column) for r in range(num_rows)]

            def load_factor(address: Value, steps: Value) -> Value:
                place = builder.add(address, skipped)
                load_factors(builder, place, scale_bytes, group, builder.add(steps, of_steps), step, [factor])
                return builder.load(factor)

            def add_group(minimum: Value | None) -> None:
                for number, begin, total, place in zip(numbers, begins, sums, places, strict=True):
                    of_base = splat(builder, builder.load(begin))
                    sum_of_group = builder.sitofp(builder.add(builder.load(total), of_base), VF32)
                    of_row = builder.fmul(splat(builder, load(builder, number, _F32, 4)), scale)
                    new = fma(builder, sum_of_group, of_row, load(builder, place, VF32, 4))
                    if minimum is not None:
                        sum_of_row = splat(builder, load(builder, offset(builder, number, 4, 2), _F32, 4))
                        new = fma(builder, sum_of_row, minimum, new)
                    store(builder, new, place, 4)

            scale = load_factor(scales, scale_steps)
            with builder.if_else(builder.icmp_signed("!=", minimums, _ZERO)) as (with_minimums, without):
                with with_minimums:
                    add_group(load_factor(minimums, minimum_steps))
                with without:
                    add_group(None)


def _is_signed(kind: int) -> bool:
    """Returns whether codes are multiplied as signed ones."""
    return instruction() != "avxvnni" and kind in _BYTE_KINDS


def _adds_words(kind: int) -> bool:
    """Returns whether products are added in 16 bits."""
    return instruction() != "avxvnni" and kind not in _BYTE_KINDS


def _in_bytes(number: int) -> ir.Constant:
    return ir.Constant(BYTES, [number] * VECTOR_BYTES)


def _smaller(builder: Builder, left: Value, right: Value) -> Value:
    return builder.select(builder.icmp_signed("<", left, right), left, right)


def _add_lines(
    builder: Builder,
    kind: int,
    decoder: LineDecoder,
    vector: Value,
    lines: Value,
    rows: list[Value],
    sums: list[Value],
    first: Value,
    end: Value,
) -> None:
    """Sum the products of a vector of the lines [first, end), for each row.

    Each line prefetches the bytes of one vector, so that the four vectors together reach every line ahead.
    """
    vector_bytes, at_once = LINE_BYTES[kind] // _VECTORS, _LINES_AT_ONCE[kind]
    turn = builder.sub(builder.mul(vector, builder.sub(end, first)), first)
    ahead = offset(builder, offset(builder, lines, LINE_BYTES[kind], first), vector_bytes, turn)
    ahead = builder.add(ahead, ir.Constant(_I64, _AHEAD_BYTES))

    def add_from(start: Value, count: int) -> None:
        line, prefetched = offset(builder, lines, LINE_BYTES[kind], start), offset(builder, ahead, vector_bytes, start)
        quads = [offset(builder, row, QUAD, start) for row in rows]
        _add_whole_lines(builder, kind, decoder, vector, line, prefetched, quads, sums, count)

    for total in sums:
        builder.store(ir.Constant(VI32, [0] * LANES), total)
    stride = ir.Constant(_I64, at_once)
    with builder.if_else(builder.icmp_signed("==", builder.add(first, stride), end)) as (one, several):
        with one:
            add_from(first, at_once)
        with several:
            rest = builder.sub(end, builder.srem(builder.sub(end, first), stride))
            with cgutils.for_range_slice(builder, first, rest, stride, _I64) as (start, _n):
                add_from(start, at_once)
            with cgutils.for_range_slice(builder, rest, end, _ONE, _I64) as (j, _m):
                add_from(j, 1)


def _add_whole_lines(
    builder: Builder,
    kind: int,
    decoder: LineDecoder,
    vector: Value,
    line: Value,
    prefetched: Value,
    quads: list[Value],
    sums: list[Value],
    count: int,
) -> None:
    """Add the products of a vector of the lines from an address on. quads: each row's first address.

    Prefetches lie between the products: in one burst they make passes from memory a tenth slower.
    """
    words: list[Value] = []
    vector_bytes = LINE_BYTES[kind] // _VECTORS
    for place in range(count):
        # the first line that reaches into a cache line, which has as many bytes as a vector
        if place * vector_bytes % VECTOR_BYTES < vector_bytes:
            emit_prefetch(builder, offset(builder, prefetched, vector_bytes, place))
        codes = decoder.vector(offset(builder, line, LINE_BYTES[kind], place), vector)
        if _is_signed(kind):
            codes = builder.xor(codes, _in_bytes(_UNSIGNED))
        of_rows = [splat(builder, load(builder, offset(builder, quad, QUAD, place), _I32, 1)) for quad in quads]
        if not _adds_words(kind):
            for quad, total in zip(of_rows, sums, strict=True):
                builder.store(_dot_quads(builder, builder.load(total), codes, quad), total)
            continue
        products = [_multiplied(builder, codes, builder.bitcast(quad, BYTES)) for quad in of_rows]
        words = (
            [hidden(builder, builder.add(*pair)) for pair in zip(words, products, strict=True)] if words else products
        )
        if (place + 1) % _LINES_OF_WORDS[kind] == 0 or place + 1 == count:
            for of_pairs, total in zip(words, sums, strict=True):
                builder.store(builder.add(builder.load(total), _widened(builder, of_pairs)), total)
            words = []


def _dot_quads(builder: Builder, total: Value, codes: Value, quad: Value) -> Value:
    """total + the products of each lane's four codes with four signed ones, exactly.

    codes: unsigned with AVX-VNNI, else signed. Two products of them fit in 16 bits: at most 2 * 128 * 127.
    """
    if instruction() == "avxvnni":
        return call_on_registers(builder, _DOT, _I32, [total, builder.bitcast(codes, VI32), quad], is_wide=False)
    is_negative = builder.icmp_signed("<", codes, _in_bytes(0))
    magnitudes = builder.select(is_negative, builder.sub(_in_bytes(0), codes), codes)
    signed = call_on_registers(builder, _SIGN, _I8, [builder.bitcast(quad, BYTES), codes], is_wide=False)
    return builder.add(total, _widened(builder, _multiplied(builder, magnitudes, signed)))


def _multiplied(builder: Builder, codes: Value, numbers: Value) -> Value:
    """The products of unsigned bytes with signed ones, added in pairs."""
    return call_on_registers(builder, _ADD_BYTES, _I16, [codes, numbers], is_wide=False)


def _widened(builder: Builder, words: Value) -> Value:
    """Signed words, added in pairs."""
    return call_on_registers(builder, _ADD_WORDS, _I32, [words, ir.Constant(_WORDS, [1] * 32)], is_wide=False)
