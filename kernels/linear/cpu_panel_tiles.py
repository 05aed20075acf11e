"""Linears over panels, compiled: bf16 rows against panels of 64 weight columns, coded or plain.

`vdpbf16ps` (AVX512-BF16), or two FMAs in its place (AVX2), add to each float lane the product of a pair's odd elements,
then of its even ones. Few rows: coded lines are decoded in registers. More rows, or AVX2: a chunk is decoded once into
scratch memory in L1. The order of a row's additions is the same in all cases. Needs numba.
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
    has_wide_registers,
    load,
    offset,
    splat,
    store,
)
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import (
    for_each,
    load_i32,
    operation,
    registers_are_wide,
    vadd,
    vload,
    vload_bf16,
    vload_bf16_first,
    vstore,
    vstore_bf16,
    vstore_bf16_first,
)
from outrider.kernels.linear.cpu_panel_coding import (
    CHUNK_LINES,
    CODED_LINE_BYTES,
    LINE_BYTES,
    PANEL_COLUMNS,
    TABLE_BYTES,
    Decoder,
    decode,
    line_of_patch,
)

_VECTORS = PANEL_COLUMNS // LANES
ROW_BYTES = PANEL_COLUMNS * 4  # fp32 sums of one row and panel
CHUNK_BYTES = CHUNK_LINES * LINE_BYTES
_CODED_CHUNK_BYTES = CHUNK_LINES * CODED_LINE_BYTES
# rows; more are computed in several passes over the panel
TILE_ROWS = 128
SCRATCH_BYTES = CHUNK_BYTES + 2 * TILE_ROWS * ROW_BYTES
# bytes; prefetch distance. Other distances, or none, are 4-8 % slower at one row, 40 % at eight
_AHEAD_BYTES = 3072
# rows of one pass; sums, a line of weights and one pair fill 29 of 32 registers, with `pass_bytes` 14 of 16
_MAX_GROUP_ROWS, _MAX_NARROW_ROWS = 6, 4
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF32, _VI32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_i = types.int64


@njit
def pass_bytes(is_wide, num_rows):  # type: ignore[no-untyped-def]
    """Bytes of the fp32 sums, of each row, that one pass takes. is_wide: in 32 registers of 16 floats, else 16 of 8."""
    return ROW_BYTES if is_wide else VECTOR_BYTES * max(1, _VECTORS // num_rows)


def _make_add(*, coded: bool) -> Any:
    """sums[r, :] = (sums[r, :] if goes_on else 0) + the products of num_lines lines' pairs, in order.

    num_rows: at most _MAX_GROUP_ROWS. coded: the lines are coded by `table` and have no patches. Prefetches num_lines
    coded lines at `ahead`. Without `has_wide_registers`: for the first `pass_bytes` of sums, of plain lines alone.
    """

    @operation(types.void, *[_i] * 9)
    @for_each(range(1, _MAX_GROUP_ROWS + 1))
    def add(
        builder: Builder,
        num_rows: int,
        x: Value,
        x_stride: Value,
        lines: Value,
        num_lines: Value,
        table: Value,
        ahead: Value,
        sums: Value,
        goes_on: Value,
    ) -> None:
        if coded and not has_wide_registers():
            return
        num_vectors = pass_bytes.py_func(has_wide_registers(), num_rows) // VECTOR_BYTES
        cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        rows = [offset(builder, x, x_stride, r) for r in range(num_rows)]
        places = {(r, v): offset(builder, offset(builder, sums, ROW_BYTES, r), VECTOR_BYTES, v) for r, v in cells}
        totals = {cell: cgutils.alloca_once(builder, _VF32) for cell in cells}
        before = builder.icmp_signed("!=", goes_on, ir.Constant(_I64, 0))
        for cell in cells:
            start = builder.select(before, load(builder, places[cell], _VF32, 4), floats(0.0))
            builder.store(start, totals[cell])
        decoder = Decoder(builder, table) if coded else None
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), num_lines, ir.Constant(_I64, 1), _I64) as (j, _n):
            for byte in range(0, min(CODED_LINE_BYTES, num_vectors * VECTOR_BYTES), VECTOR_BYTES):
                emit_prefetch(
                    builder, builder.add(offset(builder, ahead, CODED_LINE_BYTES, j), ir.Constant(_I64, byte))
                )
            line = offset(builder, lines, CODED_LINE_BYTES if coded else LINE_BYTES, j)
            columns = list(decoder.vectors(line) if decoder else _plain_vectors(builder, line, num_vectors))
            for r in range(num_rows):
                pair = splat(builder, load(builder, offset(builder, rows[r], 4, j), _I32, 2))
                for v in range(num_vectors):
                    builder.store(dot_pairs(builder, builder.load(totals[r, v]), pair, columns[v]), totals[r, v])
        for cell in cells:
            store(builder, builder.load(totals[cell]), places[cell], 4)

    return add


def _plain_vectors(builder: Builder, line: Value, num_vectors: int) -> list[Value]:
    return [load(builder, offset(builder, line, VECTOR_BYTES, v), _VI32, 2) for v in range(num_vectors)]


# rows; up to here lines are decoded in registers, per group, if there are 32. Decoding a chunk instead: 8 % slower at
# 12, equal at 16
_MAX_ROWS_DECODED_IN_REGISTERS = 12
_add_plain, _add_coded = _make_add(coded=False), _make_add(coded=True)


class CallFields(NamedTuple):
    """Addresses, and strides in bytes."""

    x: int  # bf16 [rows, num_inputs]
    x_stride: int
    panels: int
    panel_stride: int
    tables: int  # uint8 [num_panels, 16]; 0: the panels are plain
    patches: int  # uint32, see cpu_panel_coding
    patch_ends: int  # int32 [num_panels, chunks of a panel], preceded by a 0
    bias: int  # bf16 [num_outputs]; 0: none
    out: int  # bf16 [rows, num_outputs]
    out_stride: int
    num_rows: int
    num_outputs: int
    num_inputs: int  # even
    block_inputs: int  # inputs per partial sum: all, or whole chunks
    scratch: int  # SCRATCH_BYTES per thread: a plain chunk, partial sums and totals of a tile of rows


CallRecord, Call = record_types(CallFields)


@njit
def _add_lines(call, x, num_rows, lines, num_lines, table, ahead, sums, goes_on):  # type: ignore[no-untyped-def]
    """Add the products of some lines, for all rows in even groups; table: 0 if the lines are plain."""
    max_rows = _MAX_GROUP_ROWS if registers_are_wide() else _MAX_NARROW_ROWS
    num_groups = (num_rows + max_rows - 1) // max_rows
    row = 0
    for group in range(num_groups):
        end = (group + 1) * num_rows // num_groups
        place, totals = x + row * call.x_stride, sums + row * ROW_BYTES
        if table == 0:
            for at in range(0, ROW_BYTES, pass_bytes(registers_are_wide(), end - row)):
                _add_plain(end - row, place, call.x_stride, lines + at, num_lines, 0, ahead + at, totals + at, goes_on)
        else:
            line_ahead = lines + _AHEAD_BYTES
            _add_coded(end - row, place, call.x_stride, lines, num_lines, table, line_ahead, totals, goes_on)
        row = end


@njit
def patches_of_chunk(call, panel, chunk):  # type: ignore[no-untyped-def]
    """Addresses of the chunk's first patch and of the next chunk's."""
    chunks_of_panel = (call.num_inputs // 2 + CHUNK_LINES - 1) // CHUNK_LINES
    patch_ends = call.patch_ends + 4 * (panel * chunks_of_panel + chunk)
    return call.patches + 4 * load_i32(patch_ends - 4), call.patches + 4 * load_i32(patch_ends)


@njit
def _add_chunk(call, panel, chunk, num_lines, x, num_rows, scratch, goes_on):  # type: ignore[no-untyped-def]
    """Add the products of one chunk, for all rows."""
    sums = scratch + CHUNK_BYTES
    lines = call.panels + panel * call.panel_stride
    if call.tables == 0:
        lines += chunk * CHUNK_BYTES
        _add_lines(call, x, num_rows, lines, num_lines, 0, lines + _AHEAD_BYTES, sums, goes_on)
        return
    lines += chunk * _CODED_CHUNK_BYTES
    table = call.tables + panel * TABLE_BYTES
    patch, end_patch = patches_of_chunk(call, panel, chunk)
    if num_rows > _MAX_ROWS_DECODED_IN_REGISTERS or not registers_are_wide():
        decode(lines, 0, num_lines, table, patch, end_patch, scratch)
        _add_lines(call, x, num_rows, scratch, num_lines, 0, lines + _CODED_CHUNK_BYTES, sums, goes_on)
        return
    line = 0
    while line < num_lines:
        # The lines before the next patched one, then that line alone.
        end = line_of_patch(patch) if patch < end_patch else num_lines
        if line < end:
            place = lines + line * CODED_LINE_BYTES
            _add_lines(call, x + 4 * line, num_rows, place, end - line, table, 0, sums, goes_on + line)
        if end < num_lines:
            last = patch + 4
            while last < end_patch and line_of_patch(last) == end:
                last += 4
            decode(lines, end, end + 1, table, patch, last, scratch)
            place = scratch + end * LINE_BYTES
            _add_lines(call, x + 4 * end, num_rows, place, 1, 0, place, sums, goes_on + end)
            patch = last
        line = end + 1


@njit
def _multiply(call, panel, x, num_rows, scratch):  # type: ignore[no-untyped-def]
    """The panel's sums of a tile of rows; returns their address."""
    sums = scratch + CHUNK_BYTES
    totals = sums + TILE_ROWS * ROW_BYTES
    lines_of_panel, lines_of_block = call.num_inputs // 2, call.block_inputs // 2
    for first in range(0, lines_of_panel, CHUNK_LINES):
        end = min(first + CHUNK_LINES, lines_of_panel)
        chunk = first // CHUNK_LINES
        _add_chunk(call, panel, chunk, end - first, x + 4 * first, num_rows, scratch, first % lines_of_block)
        if lines_of_panel > lines_of_block and (end % lines_of_block == 0 or end == lines_of_panel):
            _join(num_rows, sums, totals, end > lines_of_block)
    return totals if lines_of_panel > lines_of_block else sums


@njit
def _join(num_rows, sums, totals, adds):  # type: ignore[no-untyped-def]
    """totals = (totals if adds else 0) + sums."""
    for place in range(0, num_rows * ROW_BYTES, VECTOR_BYTES):
        fresh = vload(sums + place)
        vstore(totals + place, vadd(vload(totals + place), fresh) if adds else fresh)


@njit
def finish(call, first, end, first_row, num_rows, sums):  # type: ignore[no-untyped-def]
    """Add the bias, round, and write a panel's sums as the outputs [first, end)."""
    for row in range(num_rows):
        for column in range(first, end, LANES):
            total = vload(sums + row * ROW_BYTES + 4 * (column - first))
            out = call.out + (first_row + row) * call.out_stride + 2 * column
            num_left = end - column
            if num_left >= LANES:
                if call.bias != 0:
                    total = vadd(total, vload_bf16(call.bias + 2 * column))
                vstore_bf16(out, total)
            else:
                if call.bias != 0:
                    total = vadd(total, vload_bf16_first(call.bias + 2 * column, num_left))
                vstore_bf16_first(out, total, num_left)


@njit
def run_call(call, panel, thread):  # type: ignore[no-untyped-def]
    """One panel for all rows."""
    scratch = call.scratch + thread * SCRATCH_BYTES
    for first_row in range(0, call.num_rows, TILE_ROWS):
        num_rows = min(TILE_ROWS, call.num_rows - first_row)
        sums = _multiply(call, panel, call.x + first_row * call.x_stride, num_rows, scratch)
        first = panel * PANEL_COLUMNS
        finish(call, first, min(first + PANEL_COLUMNS, call.num_outputs), first_row, num_rows, sums)


@njit
def run_panel(address, panel, thread):  # type: ignore[no-untyped-def]
    """A unit of work."""
    run_call(carray(address, 1, Call)[0], panel, thread)
