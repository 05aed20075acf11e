"""Linears over panels with AMX, compiled: 16 rows x 32 inputs x 16 columns per instruction.

`tdpbf16ps` adds to a tile of fp32 sums [16 rows, 16 columns] the products of 16 input pairs: the even and the odd
elements each in a chain of fused multiply-adds from zero, then the chains' sum. The order is the same for any number of
rows (a single row goes through a tile too), but not that of `vdpbf16ps` (cpu_panel_tiles): a verifier with AMX has
numerics of its own. A tile of weights is 16 lines of one vector of a panel (cpu_panel_coding).

us per matrix (2 cores of an Intel Xeon, 2.6 GHz, 16 matrices of 4096 x 1024 out of cache):
    rows          1-16       32    64    128
    this          272        346   498   844
    oneDNN, AMX   345-391    417   489   702
    `vdpbf16ps`   533-1019   1632  2853
The caller checks that AMX may be used. Needs numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types

from outrider.kernels.cpu.emitters import VECTOR_BYTES, Builder, Value, emit_prefetch, store
from outrider.kernels.cpu.simd import operation
from outrider.kernels.linear.cpu_panel_coding import (
    CHUNK_LINES,
    CODED_LINE_BYTES,
    LINE_BYTES,
    PANEL_COLUMNS,
    TABLE_BYTES,
    apply_patches,
    line_of_patch,
    make_decode_lines,
)
from outrider.kernels.linear.cpu_panel_tiles import CHUNK_BYTES, ROW_BYTES, TILE_ROWS, Call, finish, patches_of_chunk

# inputs per instruction; the weight's number of inputs must be a multiple
TILE_INPUTS = 32
_TILE_LINES = TILE_INPUTS // 2
_TILE_ROWS = 16
_TILE_LINES_BYTES = _TILE_LINES * LINE_BYTES
# Tile registers: four vectors of sums, the inputs, and three for weights in rotation.
_SUMS, _INPUTS, _WEIGHTS = range(4), 4, (5, 6, 7)
_PALETTE_BYTES = 64
# bytes per thread: a decoded chunk, the sums of a tile of rows, the palette
SCRATCH_BYTES = CHUNK_BYTES + TILE_ROWS * ROW_BYTES + _PALETTE_BYTES
# bytes; prefetch distance; up to 24,576 within 5 %
_AHEAD_BYTES = 3072
# cache lines of the next chunk, prefetched in each multiply of a chunk's first 32 rows: 15.7 -> 20.5 GB/s at 32 rows
_PREFETCHED_LINES = 24
_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_i, _void = types.int64, types.void


def _call(builder: Builder, name: str, *operands: Value) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=function_type), list(operands))


def _pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, ir.PointerType(_I8))


def _register(number: int) -> ir.Constant:
    return ir.Constant(_I8, number)


@operation(_void, _i, _i)
def _shape_tiles(builder: Builder, num_rows: Value, palette: Value) -> None:
    """Configure tiles (inputs and sums: num_rows rows) and zero them. palette: address of 64 writable bytes."""
    for byte in range(0, _PALETTE_BYTES, 8):
        store(builder, ir.Constant(_I64, 1 if byte == 0 else 0), builder.add(palette, ir.Constant(_I64, byte)), 8)
    for register in range(8):
        rows = ir.Constant(_I8, _TILE_LINES) if register in _WEIGHTS else builder.trunc(num_rows, _I8)
        width = ir.Constant(_I16, VECTOR_BYTES)
        store(builder, width, builder.add(palette, ir.Constant(_I64, 16 + 2 * register)), 2)
        store(builder, rows, builder.add(palette, ir.Constant(_I64, 48 + register)), 1)
    _call(builder, "ldtilecfg", _pointer(builder, palette))


@operation(_void)
def _release_tiles(builder: Builder) -> None:
    """Release the tiles, so that a context switch saves 8 KB less."""
    _call(builder, "tilerelease")


@operation(_void)
def _clear_sums(builder: Builder) -> None:
    for vector in _SUMS:
        _call(builder, "tilezero", _register(vector))


def _move_sums(builder: Builder, name: str, sums: Value) -> None:
    for vector in _SUMS:
        place = builder.add(sums, ir.Constant(_I64, VECTOR_BYTES * vector))
        _call(builder, name, _register(vector), _pointer(builder, place), ir.Constant(_I64, ROW_BYTES))


@operation(_void, _i)
def _load_sums(builder: Builder, sums: Value) -> None:
    _move_sums(builder, "tileloadd64", sums)


@operation(_void, _i)
def _store_sums(builder: Builder, sums: Value) -> None:
    _move_sums(builder, "tilestored64", sums)


def _make_add_products(num_prefetched: int) -> Any:
    """Makes the multiply of 16 lines. num_prefetched: cache lines prefetched meanwhile, from `ahead` on."""

    @operation(_void, _i, _i, _i, _i)
    def add_products(builder: Builder, x: Value, x_stride: Value, lines: Value, ahead: Value) -> None:
        """Add the products of 16 decoded lines to the sums."""
        _call(builder, "tileloadd64", _register(_INPUTS), _pointer(builder, x), x_stride)
        for vector in _SUMS:
            for line in range(vector, num_prefetched, len(_SUMS)):
                emit_prefetch(builder, builder.add(ahead, ir.Constant(_I64, VECTOR_BYTES * line)))
            weights = _register(_WEIGHTS[vector % len(_WEIGHTS)])
            place = builder.add(lines, ir.Constant(_I64, VECTOR_BYTES * vector))
            _call(builder, "tileloadd64", weights, _pointer(builder, place), ir.Constant(_I64, LINE_BYTES))
            _call(builder, "tdpbf16ps", _register(vector), _register(_INPUTS), weights)

    return add_products


_add_products = _make_add_products(0)
_add_products_and_prefetch = _make_add_products(_PREFETCHED_LINES)


_decode_lines = make_decode_lines(_AHEAD_BYTES)


@njit
def _decode(call, panel, first, num_lines, patch, lines):  # type: ignore[no-untyped-def]
    """Decode num_lines of the panel from line `first` on, all in one chunk, to `lines`.

    patch: address of the first patch at or after `first`; returns that of the first patch after these lines."""
    coded = call.panels + panel * call.panel_stride + first * CODED_LINE_BYTES
    _decode_lines(coded, call.tables + panel * TABLE_BYTES, num_lines, lines)
    chunk, first_of_chunk = first // CHUNK_LINES, first % CHUNK_LINES
    _first, end_patch = patches_of_chunk(call, panel, chunk)
    end = patch
    while end < end_patch and line_of_patch(end) < first_of_chunk + num_lines:
        end += 4
    apply_patches(patch, end, lines - first_of_chunk * LINE_BYTES)
    return end


@njit
def _multiply_few(call, panel, x, num_rows, scratch, sums, palette):  # type: ignore[no-untyped-def]
    """The panel's sums of up to 16 rows; 16 lines are decoded while the previous 16 are multiplied."""
    num_lines = call.num_inputs // 2
    _shape_tiles(num_rows, palette)
    if call.tables == 0:
        lines = call.panels + panel * call.panel_stride
        for line in range(0, num_lines, _TILE_LINES):
            _add_products(x + 4 * line, call.x_stride, lines + line * LINE_BYTES, 0)
    else:
        patch = _decode(call, panel, 0, _TILE_LINES, patches_of_chunk(call, panel, 0)[0], scratch)
        for line in range(0, num_lines, _TILE_LINES):
            place = line // _TILE_LINES % 2 * _TILE_LINES_BYTES
            _add_products(x + 4 * line, call.x_stride, scratch + place, 0)
            following = line + _TILE_LINES
            if following < num_lines:
                other = scratch + _TILE_LINES_BYTES - place
                patch = _decode(call, panel, following, _TILE_LINES, patch, other)
    _store_sums(sums)


@njit
def _multiply_many(call, panel, x, num_rows, scratch, sums, palette):  # type: ignore[no-untyped-def]
    """The panel's sums of more rows; each chunk is decoded once for all."""
    num_lines = call.num_inputs // 2
    patch = 0 if call.tables == 0 else patches_of_chunk(call, panel, 0)[0]
    rows_of_last = num_rows % _TILE_ROWS or _TILE_ROWS
    _shape_tiles(_TILE_ROWS, palette)
    for first in range(0, num_lines, CHUNK_LINES):
        count = min(CHUNK_LINES, num_lines - first)
        if call.tables == 0:
            lines = call.panels + panel * call.panel_stride + first * LINE_BYTES
            ahead = lines + CHUNK_BYTES
        else:
            lines = scratch
            patch = _decode(call, panel, first, count, patch, lines)
            ahead = call.panels + panel * call.panel_stride + (first + CHUNK_LINES) * CODED_LINE_BYTES
        for row in range(0, num_rows, _TILE_ROWS):
            place, is_last = sums + row * ROW_BYTES, row + _TILE_ROWS >= num_rows
            if is_last and rows_of_last < _TILE_ROWS:
                _shape_tiles(rows_of_last, palette)
            if first > 0:
                _load_sums(place)
            else:
                _clear_sums()
            inputs = x + row * call.x_stride + 4 * first
            for line in range(0, count, _TILE_LINES):
                if row < 2 * _TILE_ROWS:
                    _add_products_and_prefetch(inputs + 4 * line, call.x_stride, lines + line * LINE_BYTES, ahead)
                    ahead += _PREFETCHED_LINES * VECTOR_BYTES
                else:
                    _add_products(inputs + 4 * line, call.x_stride, lines + line * LINE_BYTES, 0)
            _store_sums(place)
        if rows_of_last < _TILE_ROWS:
            _shape_tiles(_TILE_ROWS, palette)


@njit
def run_call(call, panel, thread):  # type: ignore[no-untyped-def]
    """One panel for all rows."""
    scratch = call.scratch + thread * SCRATCH_BYTES
    sums = scratch + CHUNK_BYTES
    palette = sums + TILE_ROWS * ROW_BYTES
    for first_row in range(0, call.num_rows, TILE_ROWS):
        num_rows = min(TILE_ROWS, call.num_rows - first_row)
        x = call.x + first_row * call.x_stride
        if num_rows <= _TILE_ROWS:
            _multiply_few(call, panel, x, num_rows, scratch, sums, palette)
        else:
            _multiply_many(call, panel, x, num_rows, scratch, sums, palette)
        _release_tiles()
        first = panel * PANEL_COLUMNS
        finish(call, first, min(first + PANEL_COLUMNS, call.num_outputs), first_row, num_rows, sums)


@njit
def run_panel(address, panel, thread):  # type: ignore[no-untyped-def]
    """A unit of work."""
    run_call(carray(address, 1, Call)[0], panel, thread)
