"""Linears in integers over panels of codes, compiled: rows of 8 bits against panels of 64 columns.

The law is int8.reference's. `vpdpbusd` adds to each 32-bit lane the products of four unsigned bytes, the codes, with
four signed ones, the row's. Sums of a group begin with its base times the sum of the row's codes. Lines are decoded in
registers, for up to six rows at a time; their order changes no bit, since the sums are integers. Here in 32 registers,
for all columns at once; in cpu_narrow_tiles in 16, for 16 columns.
Needs an instruction of cpu_lines.instruction (checked by the caller) and numba.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from outrider.kernels.cpu.emitters import (
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
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import for_each, operation, vsplat, vstore
from outrider.kernels.cpu.units import place_among_neighbours
from outrider.kernels.linear.cpu_code_tiles import Panel, load_factors
from outrider.kernels.linear.cpu_panel_coding import PANEL_COLUMNS, pointer
from outrider.kernels.linear.cpu_panel_tiles import ROW_BYTES, TILE_ROWS, finish
from outrider.kernels.linear.int8 import cpu_narrow_tiles as narrow
from outrider.kernels.linear.int8.cpu_lines import (
    GROUP_BYTES,
    I4,
    I5,
    I6,
    I8,
    LINE_BYTES,
    TABLE,
    LineDecoder,
    lines_are_whole,
    takes_whole_lines,
)
from outrider.kernels.linear.int8.reference import QUAD

_VECTORS = PANEL_COLUMNS // LANES
SCRATCH_BYTES = TILE_ROWS * ROW_BYTES
# bytes; prefetch distance. Lines are read faster than for bf16, and 3072 is too late for memory: 3.35 -> 3.08 ms for
# 66 MB at one row (one core of an AMD EPYC, Zen 4); 12288 takes 3.17, no difference from four rows on
_AHEAD_BYTES = 8192
# rows of one pass: their sums and a line fill 28 of 32 registers
_MAX_GROUP_ROWS = 6
# rows of one pass; their sums and totals fit in 32 registers
_MAX_ROWS_WITH_TOTALS_IN_REGISTERS = 3
# lines; read by all passes over the rows while they are in L1
_CHUNK_LINES = 64
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_i = types.int64
_DOT = "llvm.x86.avx512.vpdpbusd.512", ""
_ZERO, _ONE = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
# lines of a group of 32 inputs, added without a loop: LLVM's own unrolling puts four lines' prefetches in one burst
_UNROLLED_LINES = 8


class CallFields(NamedTuple):
    """Addresses, and strides in bytes."""

    x: int  # int8 [rows, 4 * num_lines]
    x_stride: int
    x_groups: int  # [rows, groups] of GROUP_BYTES
    x_groups_stride: int
    panels: int  # of cpu_code_tiles.PanelFields
    num_panels: int
    bias: int  # bf16 [outputs]; 0: none
    out: int  # bf16 [rows, outputs]
    out_stride: int
    num_rows: int
    num_lines: int
    num_threads: int
    scratch: int  # SCRATCH_BYTES per thread: totals of a tile of rows


CallRecord, Call = record_types(CallFields)


def _dot_quads(builder: Builder, total: Value, codes: Value, quad: Value) -> Value:
    """total + the products of each lane's four unsigned codes with four signed ones, exactly."""
    return call_on_registers(builder, _DOT, _I32, [total, builder.bitcast(codes, VI32), quad], is_wide=True)


def _add_line(
    builder: Builder,
    kind: int,
    decoder: LineDecoder,
    lines: Value,
    rows: list[Value],
    sums: Any,
    j: Value,
) -> None:
    """Add the products of line j to the sums of each row and vector."""
    line = offset(builder, lines, LINE_BYTES[kind], j)
    for byte in range(0, LINE_BYTES[kind], VECTOR_BYTES):
        emit_prefetch(builder, builder.add(line, ir.Constant(_I64, _AHEAD_BYTES + byte)))
    columns = list(decoder.vectors(line))
    for r, row in enumerate(rows):
        quad = splat(builder, load(builder, offset(builder, row, QUAD, j), _I32, 1))
        for v, column in enumerate(columns):
            builder.store(_dot_quads(builder, builder.load(sums[r, v]), column, quad), sums[r, v])


@operation(types.void, *[_i] * 19)
@for_each((I4, TABLE, I5, I6, I8), range(1, _MAX_GROUP_ROWS + 1))
def _add(
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
    """Add the groups of num_lines lines to totals[r, :]; the first line begins a group."""
    if not takes_whole_lines():
        return
    decoder = LineDecoder(builder, kind, table)
    cells = [(r, v) for r in range(num_rows) for v in range(_VECTORS)]
    sums = {cell: cgutils.alloca_once(builder, VI32) for cell in cells}
    going_on = {cell: cgutils.alloca_once(builder, VF32) for cell in cells}
    factors = [cgutils.alloca_once(builder, VF32) for _ in range(_VECTORS)]
    rows = [offset(builder, x, x_stride, r) for r in range(num_rows)]
    groups = [offset(builder, x_groups, x_groups_stride, r) for r in range(num_rows)]
    places = {(r, v): offset(builder, offset(builder, totals, ROW_BYTES, r), VECTOR_BYTES, v) for r, v in cells}
    base32 = builder.trunc(base, _I32)
    stay = num_rows <= _MAX_ROWS_WITH_TOTALS_IN_REGISTERS
    for cell in cells if stay else ():
        builder.store(load(builder, places[cell], VF32, 4), going_on[cell])
    num_groups = builder.sdiv(builder.sub(builder.add(num_lines, group_lines), _ONE), group_lines)
    with cgutils.for_range_slice(builder, _ZERO, num_groups, _ONE, _I64) as (group, _n):
        numbers = [offset(builder, groups[r], GROUP_BYTES, group) for r in range(num_rows)]
        for r in range(num_rows):
            begin = builder.mul(load(builder, offset(builder, numbers[r], 4, 1), _I32, 4), base32)
            for v in range(_VECTORS):
                builder.store(splat(builder, begin), sums[r, v])
        first = builder.mul(group, group_lines)
        end = builder.add(first, group_lines)
        end = builder.select(builder.icmp_signed("<", end, num_lines), end, num_lines)
        add_line = functools.partial(_add_line, builder, kind, decoder, lines, rows, sums)
        is_whole = builder.icmp_signed("==", builder.sub(end, first), ir.Constant(_I64, _UNROLLED_LINES))
        with builder.if_else(is_whole) as (whole, others):
            with whole:
                for place in range(_UNROLLED_LINES):
                    add_line(builder.add(first, ir.Constant(_I64, place)))
            with others, cgutils.for_range_slice(builder, first, end, _ONE, _I64) as (j, _n):
                add_line(j)
        step = builder.ashr(builder.add(first_group, group), step_shift)
        load_factors(builder, scales, scale_bytes, group, scale_steps, step, factors)
        for r, v in cells:
            total = builder.load(going_on[r, v]) if stay else load(builder, places[r, v], VF32, 4)
            of_row = splat(builder, load(builder, numbers[r], _F32, 4))
            factor = builder.fmul(of_row, builder.load(factors[v]))
            sum_of_group = builder.sitofp(builder.load(sums[r, v]), VF32)
            builder.store(fma(builder, sum_of_group, factor, total), going_on[r, v])
        with builder.if_then(builder.icmp_signed("!=", minimums, _ZERO)):
            load_factors(builder, minimums, scale_bytes, group, minimum_steps, step, factors)
            for r, v in cells:
                sum_of_row = splat(builder, load(builder, offset(builder, numbers[r], 4, 2), _F32, 4))
                total = fma(builder, sum_of_row, builder.load(factors[v]), builder.load(going_on[r, v]))
                builder.store(total, going_on[r, v])
        for cell in () if stay else cells:
            store(builder, builder.load(going_on[cell]), places[cell], 4)
    for cell in cells if stay else ():
        store(builder, builder.load(going_on[cell]), places[cell], 4)


@njit
def _max_rows(kind):  # type: ignore[no-untyped-def]
    """Most rows of one pass."""
    return _MAX_GROUP_ROWS if lines_are_whole() else narrow.max_rows(kind)


@njit
def _add_chunk(call, panel, first, num_lines, first_row, num_rows, totals):  # type: ignore[no-untyped-def]
    """Add the products of the whole groups in lines [first, first + num_lines), for all rows in even passes."""
    lines = panel.lines + first * LINE_BYTES[panel.kind]
    first_group = first // panel.group_lines
    group_bytes = first_group * PANEL_COLUMNS * panel.scale_bytes
    minimums = 0 if panel.minimums == 0 else panel.minimums + group_bytes
    max_rows = _max_rows(panel.kind)
    num_passes = (num_rows + max_rows - 1) // max_rows
    row = 0
    for number in range(num_passes):
        end = (number + 1) * num_rows // num_passes
        x = call.x + (first_row + row) * call.x_stride + QUAD * first
        x_groups = call.x_groups + (first_row + row) * call.x_groups_stride + GROUP_BYTES * first_group
        products = (
            panel.kind, end - row, x, call.x_stride, x_groups, call.x_groups_stride, lines, num_lines,
            panel.group_lines, panel.table, panel.base, panel.scales + group_bytes, minimums, panel.scale_bytes,
            panel.scale_steps, panel.minimum_steps, panel.step_shift, first_group, totals + row * ROW_BYTES,
        )  # fmt: skip
        if lines_are_whole():
            _add(*products)
        else:
            narrow.add(*products)
        row = end


@njit
def run_panel(address, unit, thread):  # type: ignore[no-untyped-def]
    """A unit of work: one panel for all rows."""
    call = carray(address, 1, Call)[0]
    place = place_among_neighbours(unit, call.num_panels, call.num_threads)
    panel = carray(pointer(call.panels), call.num_panels, Panel)[place]
    totals = call.scratch + thread * SCRATCH_BYTES
    for first_row in range(0, call.num_rows, TILE_ROWS):
        num_rows = min(TILE_ROWS, call.num_rows - first_row)
        for place in range(0, num_rows * ROW_BYTES, VECTOR_BYTES):
            vstore(totals + place, vsplat(types.float32(0.0)))
        chunk_lines = call.num_lines
        if num_rows > _max_rows(panel.kind):
            chunk_lines = max(1, _CHUNK_LINES // panel.group_lines) * panel.group_lines
        for first in range(0, call.num_lines, chunk_lines):
            num_lines = min(chunk_lines, call.num_lines - first)
            _add_chunk(call, panel, first, num_lines, first_row, num_rows, totals)
        finish(call, panel.first_output, panel.end_output, first_row, num_rows, totals)
