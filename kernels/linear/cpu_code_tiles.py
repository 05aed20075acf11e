"""Linears over panels of codes, compiled: bf16 rows against panels of 64 columns; the law is coded_reference's.

Few rows: lines are decoded in registers, where a group's sums lie too; totals lie there up to three rows, else in
memory. More rows: a chunk of whole groups is decoded once into scratch memory in L1, and read by three rows at a time.
The order of a row's additions is the same in all cases.
Needs AVX512-BF16 (checked by the caller) and numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from outrider.kernels.cpu.emitters import (
    LANES,
    VECTOR_BYTES,
    Builder,
    Value,
    dot_pairs,
    emit_prefetch,
    floats,
    fma,
    load,
    offset,
    splat,
    store,
)
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import operation, vsplat, vstore
from outrider.kernels.linear.cpu_code_decoding import BF16, E4M3, I4, I5, I6, I8, LINE_BYTES, LineDecoder
from outrider.kernels.linear.cpu_panel_coding import CHUNK_LINES, PANEL_COLUMNS, pointer
from outrider.kernels.linear.cpu_panel_tiles import CHUNK_BYTES, ROW_BYTES, TILE_ROWS, finish

_VECTORS = PANEL_COLUMNS // LANES
SCRATCH_BYTES = CHUNK_BYTES + TILE_ROWS * ROW_BYTES
# bytes; prefetch distance, as of coded bf16 panels
_AHEAD_BYTES = 3072
# rows of one pass, and rows up to which lines are decoded in registers, as of coded bf16 panels
_MAX_GROUP_ROWS = 6
_MAX_ROWS_DECODED_IN_REGISTERS = 12
# rows of one pass over decoded lines; their sums and totals fit in 32 registers
_MAX_ROWS_WITH_TOTALS_IN_REGISTERS = 3
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF32, _VF16 = ir.VectorType(_F32, LANES), ir.VectorType(ir.HalfType(), LANES)
_VI8, _VI32 = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_I32, LANES)
_i = types.int64
_ZERO, _ONE = ir.Constant(_I64, 0), ir.Constant(_I64, 1)


class PanelFields(NamedTuple):
    """A panel's addresses, and the kind of its codes."""

    kind: int  # of cpu_code_decoding, or of int8.cpu_lines
    lines: int  # uint8 [lines, LINE_BYTES[kind]]
    table: int  # table_bytes; 0: the kind has none
    scales: int  # [groups, 64]
    minimums: int  # as scales; 0: none
    scale_bytes: int  # 1: int8, codes times steps; 2: float16, 4: float32; of scales and minimums
    scale_steps: int  # float16 [steps, 64]; 0: scales are no codes
    minimum_steps: int  # likewise
    step_shift: int  # log2 of the groups of a step
    base: int  # of int8.cpu_lines
    group_lines: int  # at most CHUNK_LINES
    first_output: int
    end_output: int


class CallFields(NamedTuple):
    """A call's addresses, and strides in bytes."""

    x: int  # bf16 [rows, 2 * num_lines]
    x_stride: int
    x_sums: int  # fp32 [rows, groups]: sums of a group's inputs; 0: no panel has minimums
    x_sums_stride: int
    panels: int  # of PanelFields
    num_panels: int
    bias: int  # bf16 [outputs]; 0: none
    out: int  # bf16 [rows, outputs]
    out_stride: int
    num_rows: int
    num_lines: int
    scratch: int  # SCRATCH_BYTES per thread: a decoded chunk, totals of a tile of rows


PanelRecord, Panel = record_types(PanelFields)
CallRecord, Call = record_types(CallFields)


def _make_add(kind: int, num_rows: int) -> Any:
    """Makes a function that adds the groups of num_lines lines to totals[r, :]; the first line begins a group."""

    @operation(types.void, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i, _i)
    def add(
        builder: Builder,
        x: Value,
        x_stride: Value,
        x_sums: Value,
        x_sums_stride: Value,
        lines: Value,
        num_lines: Value,
        group_lines: Value,
        table: Value,
        scales: Value,
        minimums: Value,
        scale_bytes: Value,
        scale_steps: Value,
        minimum_steps: Value,
        step_shift: Value,
        first_group: Value,
        totals: Value,
    ) -> None:
        decoder = LineDecoder(builder, kind, table)
        cells = [(r, v) for r in range(num_rows) for v in range(_VECTORS)]
        sums, going_on = ({cell: cgutils.alloca_once(builder, _VF32) for cell in cells} for _ in range(2))
        factors = [cgutils.alloca_once(builder, _VF32) for _ in range(_VECTORS)]
        rows = [offset(builder, x, x_stride, r) for r in range(num_rows)]
        places = {(r, v): offset(builder, offset(builder, totals, ROW_BYTES, r), VECTOR_BYTES, v) for r, v in cells}
        stay = num_rows <= _MAX_ROWS_WITH_TOTALS_IN_REGISTERS
        for cell in cells if stay else ():
            builder.store(load(builder, places[cell], _VF32, 4), going_on[cell])
        last_group = builder.sub(builder.add(num_lines, group_lines), _ONE)
        num_groups = builder.sdiv(last_group, group_lines)
        with cgutils.for_range_slice(builder, _ZERO, num_groups, _ONE, _I64) as (group, _n):
            for cell in cells:
                builder.store(floats(0.0), sums[cell])
            first = builder.mul(group, group_lines)
            end = builder.add(first, group_lines)
            end = builder.select(builder.icmp_signed("<", end, num_lines), end, num_lines)
            with cgutils.for_range_slice(builder, first, end, _ONE, _I64) as (j, _n):
                line = offset(builder, lines, LINE_BYTES[kind], j)
                for byte in range(0, LINE_BYTES[kind], VECTOR_BYTES) if kind != BF16 else ():
                    emit_prefetch(builder, builder.add(line, ir.Constant(_I64, _AHEAD_BYTES + byte)))
                columns = list(decoder.vectors(line))
                for r in range(num_rows):
                    pair = splat(builder, load(builder, offset(builder, rows[r], 4, j), _I32, 2))
                    for v in range(_VECTORS):
                        builder.store(dot_pairs(builder, builder.load(sums[r, v]), pair, columns[v]), sums[r, v])
            step = builder.ashr(builder.add(first_group, group), step_shift)
            load_factors(builder, scales, scale_bytes, group, scale_steps, step, factors)
            for r, v in cells:
                total = builder.load(going_on[r, v]) if stay else load(builder, places[r, v], _VF32, 4)
                builder.store(fma(builder, builder.load(sums[r, v]), builder.load(factors[v]), total), going_on[r, v])
            with builder.if_then(builder.icmp_signed("!=", minimums, _ZERO)):
                load_factors(builder, minimums, scale_bytes, group, minimum_steps, step, factors)
                for r in range(num_rows):
                    row = offset(builder, x_sums, x_sums_stride, r)
                    sum_of_x = splat(builder, load(builder, offset(builder, row, 4, group), _F32, 4))
                    for v in range(_VECTORS):
                        total = fma(builder, sum_of_x, builder.load(factors[v]), builder.load(going_on[r, v]))
                        builder.store(total, going_on[r, v])
            for cell in () if stay else cells:
                store(builder, builder.load(going_on[cell]), places[cell], 4)
        for cell in cells if stay else ():
            store(builder, builder.load(going_on[cell]), places[cell], 4)

    return add


def load_factors(
    builder: Builder, address: Value, num_bytes: Value, group: Value, steps: Value, step: Value, factors: list[Value]
) -> None:
    """The 64 scales or minimums of a group, widened, to `factors`."""
    place = builder.add(address, builder.mul(builder.mul(num_bytes, group), ir.Constant(_I64, PANEL_COLUMNS)))
    with builder.if_else(builder.icmp_signed("==", num_bytes, ir.Constant(_I64, 2))) as (halves, others):
        with halves:
            _store_halves(builder, place, factors)
        with others, builder.if_else(builder.icmp_signed("==", num_bytes, _ONE)) as (coded, wide):
            with coded:
                _store_halves(builder, offset(builder, steps, 2 * PANEL_COLUMNS, step), factors)
                for v, factor in enumerate(factors):
                    codes = builder.sext(load(builder, offset(builder, place, LANES, v), _VI8, 1), _VI32)
                    value = builder.fmul(builder.sitofp(codes, _VF32), builder.load(factor))
                    builder.store(value, factor)
            with wide:
                for v, factor in enumerate(factors):
                    builder.store(load(builder, offset(builder, place, 4 * LANES, v), _VF32, 4), factor)


def _store_halves(builder: Builder, place: Value, factors: list[Value]) -> None:
    for v, factor in enumerate(factors):
        builder.store(builder.fpext(load(builder, offset(builder, place, 2 * LANES, v), _VF16, 2), _VF32), factor)


def _make_decode(kind: int) -> Any:
    @operation(types.void, _i, _i, _i, _i)
    def decode(builder: Builder, lines: Value, num_lines: Value, table: Value, decoded: Value) -> None:
        """Decode lines to bf16 lines at `decoded`."""
        decoder = LineDecoder(builder, kind, table)
        with cgutils.for_range_slice(builder, _ZERO, num_lines, _ONE, _I64) as (j, _n):
            line = offset(builder, lines, LINE_BYTES[kind], j)
            for byte in range(0, LINE_BYTES[kind], VECTOR_BYTES):
                emit_prefetch(builder, builder.add(line, ir.Constant(_I64, _AHEAD_BYTES + byte)))
            for place, vector in enumerate(decoder.vectors(line)):
                store(builder, vector, offset(builder, offset(builder, decoded, 256, j), VECTOR_BYTES, place), 1)

    return decode


_decode_i4, _decode_i5, _decode_i6, _decode_i8, _decode_e4m3 = map(_make_decode, (I4, I5, I6, I8, E4M3))


def _make_add_rows(kind: int) -> Any:
    """Makes one function that calls _make_add's for the number of rows, at most _MAX_GROUP_ROWS."""
    one, two, three, four, five, six = (_make_add(kind, rows) for rows in range(1, _MAX_GROUP_ROWS + 1))

    @njit
    def add_rows(num_rows, inputs, panel, lines, num_lines, factors, totals):  # type: ignore[no-untyped-def]
        x, x_stride, x_sums, sums_stride = inputs
        scales, minimums, first_group = factors
        call = (
            x, x_stride, x_sums, sums_stride, lines, num_lines, panel.group_lines, panel.table, scales, minimums,
            panel.scale_bytes, panel.scale_steps, panel.minimum_steps, panel.step_shift, first_group, totals,
        )  # fmt: skip
        if num_rows == 1:
            one(*call)
        elif num_rows == 2:
            two(*call)
        elif num_rows == 3:
            three(*call)
        elif num_rows == 4:
            four(*call)
        elif num_rows == 5:
            five(*call)
        else:
            six(*call)

    return add_rows


_add_i4, _add_i5, _add_i6, _add_i8, _add_e4m3, _add_bf16 = map(_make_add_rows, range(len(LINE_BYTES)))


@njit
def _add_chunk(call, panel, first, num_lines, x, x_sums, num_rows, scratch):  # type: ignore[no-untyped-def]
    """Add the products of the whole groups in lines [first, first + num_lines), for all rows in even groups."""
    lines = panel.lines + first * LINE_BYTES[panel.kind]
    first_group = first // panel.group_lines
    group_bytes = first_group * PANEL_COLUMNS * panel.scale_bytes
    scales = panel.scales + group_bytes
    minimums = 0 if panel.minimums == 0 else panel.minimums + group_bytes
    kind = panel.kind
    if num_rows > _MAX_ROWS_DECODED_IN_REGISTERS:
        if kind == I4:
            _decode_i4(lines, num_lines, panel.table, scratch)
        elif kind == I5:
            _decode_i5(lines, num_lines, panel.table, scratch)
        elif kind == I6:
            _decode_i6(lines, num_lines, panel.table, scratch)
        elif kind == I8:
            _decode_i8(lines, num_lines, panel.table, scratch)
        else:
            _decode_e4m3(lines, num_lines, panel.table, scratch)
        kind, lines = BF16, scratch
    group_rows = _MAX_ROWS_WITH_TOTALS_IN_REGISTERS if kind == BF16 else _MAX_GROUP_ROWS
    num_groups = (num_rows + group_rows - 1) // group_rows
    row = 0
    for group in range(num_groups):
        end = (group + 1) * num_rows // num_groups
        first_input, first_sum = x + row * call.x_stride + 4 * first, x_sums + row * call.x_sums_stride
        inputs = first_input, call.x_stride, first_sum, call.x_sums_stride
        totals = scratch + CHUNK_BYTES + row * ROW_BYTES
        products = (end - row, inputs, panel, lines, num_lines, (scales, minimums, first_group), totals)
        if kind == I4:
            _add_i4(*products)
        elif kind == I5:
            _add_i5(*products)
        elif kind == I6:
            _add_i6(*products)
        elif kind == I8:
            _add_i8(*products)
        elif kind == E4M3:
            _add_e4m3(*products)
        else:
            _add_bf16(*products)
        row = end


@njit
def run_panel(address, unit, thread):  # type: ignore[no-untyped-def]
    """A unit of work: one panel for all rows."""
    call = carray(address, 1, Call)[0]
    panel = carray(pointer(call.panels), call.num_panels, Panel)[unit]
    scratch = call.scratch + thread * SCRATCH_BYTES
    chunk_lines = CHUNK_LINES // panel.group_lines * panel.group_lines
    for first_row in range(0, call.num_rows, TILE_ROWS):
        num_rows = min(TILE_ROWS, call.num_rows - first_row)
        totals = scratch + CHUNK_BYTES
        for place in range(0, num_rows * ROW_BYTES, VECTOR_BYTES):
            vstore(totals + place, vsplat(types.float32(0.0)))
        x = call.x + first_row * call.x_stride
        for first in range(0, call.num_lines, chunk_lines):
            num_lines = min(chunk_lines, call.num_lines - first)
            x_sums = call.x_sums + first_row * call.x_sums_stride + 4 * (first // panel.group_lines)
            _add_chunk(call, panel, first, num_lines, x, x_sums, num_rows, scratch)
        finish(call, panel.first_output, panel.end_output, first_row, num_rows, totals)
