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
# lines that are added without a loop. Each adds at most 2 * 127 * its largest code to a sum in 16 bits, so 8 lines of
# codes below 16 fit, 4 below 32 and 2 below 64; whole bytes are summed in 32 bits
_LINES_AT_ONCE = {I4: 8, I5: 4, I6: 2, I8: 4, TABLE: 4}
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
    rows = [offset(builder, x, x_stride, r) for r in range(num_rows)]
    groups = [offset(builder, x_groups, x_groups_stride, r) for r in range(num_rows)]
    base32 = builder.trunc(builder.add(base, ir.Constant(_I64, _UNSIGNED if _is_signed(kind) else 0)), _I32)
    num_groups = builder.sdiv(builder.sub(builder.add(num_lines, group_lines), _ONE), group_lines)
    with cgutils.for_range_slice(builder, _ZERO, num_groups, _ONE, _I64) as (group, _n):
        numbers = [offset(builder, groups[r], GROUP_BYTES, group) for r in range(num_rows)]
        first = builder.mul(group, group_lines)
        end = _smaller(builder, builder.add(first, group_lines), num_lines)
        step = builder.ashr(builder.add(first_group, group), step_shift)
        with cgutils.for_range_slice(builder, _ZERO, ir.Constant(_I64, _VECTORS), _ONE, _I64) as (vector, _m):
            for number, total in zip(numbers, sums, strict=True):
                begin = builder.mul(load(builder, offset(builder, number, 4, 1), _I32, 4), base32)
                builder.store(splat(builder, begin), total)
            _add_lines(builder, kind, decoder, vector, lines, rows, sums, first, end)
            column = builder.mul(vector, ir.Constant(_I64, LANES))
            skipped, of_steps = builder.mul(column, scale_bytes), builder.mul(column, ir.Constant(_I64, 2))
            places = [offset(builder, offset(builder, totals, ROW_BYTES, r), 4, column) for r in range(num_rows)]

            def load_factor(address: Value, steps: Value) -> Value:
                place = builder.add(address, skipped)
                load_factors(builder, place, scale_bytes, group, builder.add(steps, of_steps), step, [factor])
                return builder.load(factor)

            scale = load_factor(scales, scale_steps)
            for number, total, place in zip(numbers, sums, places, strict=True):
                of_row = builder.fmul(splat(builder, load(builder, number, _F32, 4)), scale)
                sum_of_group = builder.sitofp(builder.load(total), VF32)
                store(builder, fma(builder, sum_of_group, of_row, load(builder, place, VF32, 4)), place, 4)
            with builder.if_then(builder.icmp_signed("!=", minimums, _ZERO)):
                minimum = load_factor(minimums, minimum_steps)
                for number, place in zip(numbers, places, strict=True):
                    sum_of_row = splat(builder, load(builder, offset(builder, number, 4, 2), _F32, 4))
                    store(builder, fma(builder, sum_of_row, minimum, load(builder, place, VF32, 4)), place, 4)


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
    """Add the products of a vector of the lines [first, end) to the sums of each row.

    Each line prefetches the bytes of one vector, so that the four vectors together reach every line ahead.
    """
    vector_bytes, adds_words = LINE_BYTES[kind] // _VECTORS, _adds_words(kind)
    turn = builder.sub(builder.mul(vector, builder.sub(end, first)), first)
    ahead = offset(builder, offset(builder, lines, LINE_BYTES[kind], first), vector_bytes, turn)
    ahead = builder.add(ahead, ir.Constant(_I64, _AHEAD_BYTES))
    words = [cgutils.alloca_once(builder, _WORDS) for _ in rows]

    def add_line(j: Value) -> None:
        emit_prefetch(builder, offset(builder, ahead, vector_bytes, j))
        codes = decoder.vector(offset(builder, lines, LINE_BYTES[kind], j), vector)
        if _is_signed(kind):
            codes = builder.xor(codes, _in_bytes(_UNSIGNED))
        for row, of_pairs, total in zip(rows, words, sums, strict=True):
            quad = splat(builder, load(builder, offset(builder, row, QUAD, j), _I32, 1))
            if adds_words:
                products = _multiplied(builder, codes, builder.bitcast(quad, BYTES))
                builder.store(builder.add(builder.load(of_pairs), products), of_pairs)
            else:
                builder.store(_dot_quads(builder, builder.load(total), codes, quad), total)

    at_once = ir.Constant(_I64, _LINES_AT_ONCE[kind])
    with cgutils.for_range_slice(builder, first, end, at_once, _I64) as (start, _n):
        for of_pairs in words if adds_words else ():
            builder.store(ir.Constant(_WORDS, [0] * 32), of_pairs)
        stop = builder.add(start, at_once)
        with builder.if_else(builder.icmp_signed("<=", stop, end)) as (whole, rest):
            with whole:
                for place in range(_LINES_AT_ONCE[kind]):
                    add_line(builder.add(start, ir.Constant(_I64, place)))
            with rest, cgutils.for_range_slice(builder, start, end, _ONE, _I64) as (j, _m):
                add_line(j)
        for of_pairs, total in zip(words, sums, strict=True) if adds_words else ():
            builder.store(builder.add(builder.load(total), _widened(builder, builder.load(of_pairs))), total)


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
