"""Linears over panels of codes, compiled: bf16 rows against panels of 64 columns; the law is coded_reference's.

Few rows: lines are decoded in registers, where a group's sums lie too; totals lie there up to three rows, else in
memory. More rows: a chunk of whole groups is decoded once into scratch memory in L1, and read by three rows at a time.
The order of a row's additions is the same in all cases.
Without AVX512-BF16 there are 16 registers of eight floats: chunks are always decoded, and read by columns of 16.
Needs a CPU of cpu_panels.supports (checked by the caller) and numba.
"""

from __future__ import annotations

from typing import NamedTuple

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
    has_wide_registers,
    load,
    offset,
    splat,
    store,
)
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import for_each, operation, registers_are_wide, vsplat, vstore
from outrider.kernels.linear.cpu_code_decoding import BF16, E4M3, I4, I5, I6, I8, LINE_BYTES, LineDecoder, decodes
from outrider.kernels.linear.cpu_panel_coding import CHUNK_LINES, PANEL_COLUMNS, pointer
from outrider.kernels.linear.cpu_panel_tiles import CHUNK_BYTES, ROW_BYTES, TILE_ROWS, finish, pass_bytes

SCRATCH_BYTES = CHUNK_BYTES + TILE_ROWS * ROW_BYTES
# bytes; prefetch distance, as of coded bf16 panels
_AHEAD_BYTES = 3072
# rows of one pass, and rows up to which lines are decoded in registers, as of coded bf16 panels
_MAX_GROUP_ROWS = 6
_MAX_ROWS_DECODED_IN_REGISTERS = 12
# rows of one pass over decoded lines; their sums and totals fit in 32 registers, with `pass_bytes` in 16
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


def _emit_add(
    builder: Builder,
    kind: int,
    num_rows: int,
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
    """Add the groups of num_lines lines to totals[r, :]; the first line begins a group.

    On a CPU without `has_wide_registers`: for the first `pass_bytes` of totals, of decoded lines alone.
    """
    if kind != BF16 and not has_wide_registers():
        return
    num_vectors = pass_bytes.py_func(has_wide_registers(), num_rows) // VECTOR_BYTES
    decoder = LineDecoder(builder, kind, table)
    cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
    sums, going_on = ({cell: cgutils.alloca_once(builder, _VF32) for cell in cells} for _ in range(2))
    factors = [cgutils.alloca_once(builder, _VF32) for _ in range(num_vectors)]
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
            columns = list(decoder.vectors(line))[:num_vectors]
            for r in range(num_rows):
                pair = splat(builder, load(builder, offset(builder, rows[r], 4, j), _I32, 2))
                for v in range(num_vectors):
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
                for v in range(num_vectors):
                    total = fma(builder, sum_of_x, builder.load(factors[v]), builder.load(going_on[r, v]))
                    builder.store(total, going_on[r, v])
        for cell in () if stay else cells:
            store(builder, builder.load(going_on[cell]), places[cell], 4)
    for cell in cells if stay else ():
        store(builder, builder.load(going_on[cell]), places[cell], 4)


_operation = operation(types.void, *[_i] * 18)
_add_codes = _operation(for_each((I4, I5, I6, I8, E4M3), range(1, _MAX_GROUP_ROWS + 1))(_emit_add))
_add_decoded = _operation(for_each((BF16,), range(1, _MAX_ROWS_WITH_TOTALS_IN_REGISTERS + 1))(_emit_add))


def load_factors(
    builder: Builder, address: Value, num_bytes: Value, group: Value, steps: Value, step: Value, factors: list[Value]
) -> None:
    """Scales or minimums of a group, widened, to `factors`: those of the 64 columns from `address` on, or the first."""
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


@operation(types.void, *[_i] * 5)
@for_each((I4, I5, I6, I8, E4M3))
def _decode(builder: Builder, kind: int, lines: Value, num_lines: Value, table: Value, decoded: Value) -> None:
    """Decode lines to bf16 lines at `decoded`."""
    if not decodes(kind):
        return
    decoder = LineDecoder(builder, kind, table)
    with cgutils.for_range_slice(builder, _ZERO, num_lines, _ONE, _I64) as (j, _n):
        line = offset(builder, lines, LINE_BYTES[kind], j)
        for byte in range(0, LINE_BYTES[kind], VECTOR_BYTES):
            emit_prefetch(builder, builder.add(line, ir.Constant(_I64, _AHEAD_BYTES + byte)))
        for place, vector in enumerate(decoder.vectors(line)):
            store(builder, vector, offset(builder, offset(builder, decoded, 256, j), VECTOR_BYTES, place), 1)


@njit
def _add_chunk(call, panel, first, num_lines, x, x_sums, num_rows, scratch):  # type: ignore[no-untyped-def]
    """Add the products of the whole groups in lines [first, first + num_lines), for all rows in even groups."""
    lines = panel.lines + first * LINE_BYTES[panel.kind]
    first_group = first // panel.group_lines
    group_bytes = first_group * PANEL_COLUMNS * panel.scale_bytes
    scales = panel.scales + group_bytes
    minimums = 0 if panel.minimums == 0 else panel.minimums + group_bytes
    kind = panel.kind
    if num_rows > _MAX_ROWS_DECODED_IN_REGISTERS or not registers_are_wide():
        _decode(kind, lines, num_lines, panel.table, scratch)
        kind, lines = BF16, scratch
    group_rows = _MAX_ROWS_WITH_TOTALS_IN_REGISTERS if kind == BF16 else _MAX_GROUP_ROWS
    num_groups = (num_rows + group_rows - 1) // group_rows
    row = 0
    for group in range(num_groups):
        end = (group + 1) * num_rows // num_groups
        for at in range(0, ROW_BYTES, pass_bytes(registers_are_wide(), end - row)):
            column = at // 4
            skipped = column * panel.scale_bytes
            products = (
                kind, end - row, x + row * call.x_stride + 4 * first, call.x_stride, x_sums + row * call.x_sums_stride,
                call.x_sums_stride, lines + at, num_lines, panel.group_lines, panel.table, scales + skipped,
                0 if minimums == 0 else minimums + skipped, panel.scale_bytes, panel.scale_steps + 2 * column,
                panel.minimum_steps + 2 * column, panel.step_shift, first_group,
                scratch + CHUNK_BYTES + row * ROW_BYTES + at,
            )  # fmt: skip
            if kind == BF16:
                _add_decoded(*products)
            else:
                _add_codes(*products)
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
