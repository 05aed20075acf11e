"""Packing, compiled: panels of bf16 weights, losslessly in 12 bits per weight.

Few rows are bound by reading weights. The upper byte of a bf16 (sign, exponent without its last bit) takes one of 16
values for nearly all weights of a panel; the lower byte hardly compresses. So a panel is stored as lower bytes, 4-bit
indices into the panel's table of 16 upper bytes, and patches for the upper bytes missing there (0.01 % of trained
weights). DFloat11 (arXiv 2504.11651) uses the same property with Huffman codes on GPUs.

Plain panel: 64 columns, stored as lines. A line is two adjacent inputs of all columns, as four vectors; vector v has
the pairs of columns 16 v to 16 v + 15. Coded line: 128 lower bytes in the order that `vpunpcklbw` and `vpunpckhbw`
undo (two vectors interleaved by eight bytes), then 64 bytes of indices: low nibbles for vectors 0 and 1, high for 2
and 3.

Needs numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from outrider.kernels.cpu.emitters import (
    VECTOR_BYTES,
    Builder,
    Value,
    emit_prefetch,
    load,
    look_up_bytes,
    offset,
    store,
)
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import operation

PANEL_COLUMNS = 64
LINE_BYTES = PANEL_COLUMNS * 4
CODED_LINE_BYTES = PANEL_COLUMNS * 3
# lines; decoded at once and sharing a patch list. 128 overflow L1: 7 % slower at 16 rows
CHUNK_LINES = 64
TABLE_BYTES = 16
_NOT_IN_TABLE = 255
_NUMBERS = 2 * PANEL_COLUMNS  # weights of a line

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VI8, _VI16, _VI32 = ir.VectorType(_I8, 64), ir.VectorType(_I16, 32), ir.VectorType(_I32, 64)
_i, _void = types.int64, types.void


class EncodeFields(NamedTuple):
    """Addresses. Two calls: choose tables and count patches, then write."""

    plain: int  # uint16 [num_panels, num_lines, 128]
    num_panels: int
    num_lines: int
    tables: int  # uint8 [num_panels, 16]
    num_patches: int  # int32 [num_panels, chunks of a panel]
    patch_starts: int  # int32 [num_panels, chunks of a panel]; 0: choose and count only
    patches: int  # uint32: byte offset in the decoded chunk | upper byte << 16
    coded: int  # uint8 [num_panels, num_lines, 192]


EncodeRecord, _Encode = record_types(EncodeFields)


@operation(types.voidptr, _i)
def pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, ir.PointerType(_I8))


@operation(_i, _i)
def load_u32(builder: Builder, address: Value) -> Value:
    """The uint32 at an address."""
    return builder.zext(load(builder, address, _I32, 4), _I64)


@operation(_void, _i, _i)
def _store_u8(builder: Builder, address: Value, byte: Value) -> None:
    store(builder, builder.trunc(byte, _I8), address, 1)


@njit
def _choose_table(plain, table):  # type: ignore[no-untyped-def]
    """The panel's 16 most frequent upper bytes; ties: the smaller byte first."""
    counts = np.zeros(256, np.int64)
    for number in plain.flat:
        counts[number >> 8] += 1
    for place in range(TABLE_BYTES):
        table[place] = np.argmax(counts)
        counts[table[place]] = -1


@njit
def _names_in(table):  # type: ignore[no-untyped-def]
    names = np.full(256, _NOT_IN_TABLE, np.uint8)
    for place in range(TABLE_BYTES):
        names[table[place]] = place
    return names


@njit
def _encode_line(plain, line_of_chunk, names, coded, patches):  # type: ignore[no-untyped-def]
    """Write a line and its patches; returns the number of patches."""
    num_patches = 0
    coded[:] = 0
    for place in range(_NUMBERS):
        upper = plain[place] >> 8
        name = names[upper]
        if name == _NOT_IN_TABLE:
            patches[num_patches] = (line_of_chunk * LINE_BYTES + 2 * place + 1) | upper << 16
            num_patches += 1
            name = 0
        vector, number = place // 32, place % 32
        byte = 16 * (number // 8) + 8 * (vector % 2) + number % 8
        coded[64 * (vector // 2) + byte] = plain[place] & 255
        coded[_NUMBERS + byte] |= name << (4 * (vector // 2))
    return num_patches


@njit
def _encode_panel(call, panel):  # type: ignore[no-untyped-def]
    shape = (call.num_panels, call.num_lines, _NUMBERS)
    plain = carray(pointer(call.plain), shape, np.uint16)[panel]
    table = carray(pointer(call.tables), (call.num_panels, TABLE_BYTES), np.uint8)[panel]
    chunks_of_panel = (call.num_lines + CHUNK_LINES - 1) // CHUNK_LINES
    num_patches = carray(pointer(call.num_patches), (call.num_panels, chunks_of_panel), np.int32)[panel]
    if call.patch_starts == 0:
        _choose_table(plain, table)
        num_patches[:] = 0
        names = _names_in(table)
        for line in range(call.num_lines):
            for number in plain[line]:
                num_patches[line // CHUNK_LINES] += names[number >> 8] == _NOT_IN_TABLE
        return
    names = _names_in(table)
    coded = carray(pointer(call.coded), (call.num_panels, call.num_lines, CODED_LINE_BYTES), np.uint8)[panel]
    starts = carray(pointer(call.patch_starts), (call.num_panels, chunks_of_panel), np.int32)[panel]
    for chunk in range(chunks_of_panel):
        patches = carray(pointer(call.patches + 4 * starts[chunk]), (num_patches[chunk],), np.uint32)
        written = 0
        for line in range(chunk * CHUNK_LINES, min((chunk + 1) * CHUNK_LINES, call.num_lines)):
            written += _encode_line(plain[line], line % CHUNK_LINES, names, coded[line], patches[written:])


@njit
def encode_panel(address, panel, _thread):  # type: ignore[no-untyped-def]
    """A unit of work: one panel."""
    _encode_panel(carray(address, 1, _Encode)[0], panel)


class Decoder:
    """Emits code that decodes lines of a panel, without patches."""

    def __init__(self, builder: Builder, table: Value) -> None:
        """table: address of the panel's table."""
        uppers = load(builder, table, ir.VectorType(_I8, TABLE_BYTES), 1)
        places = ir.Constant(_VI32, [place % TABLE_BYTES for place in range(64)])
        self._builder = builder
        self._uppers = builder.shuffle_vector(uppers, uppers, places)

    def vectors(self, line: Value) -> Iterator[Value]:
        """The four vectors of the coded line at an address, as 64 bytes each."""
        builder = self._builder
        names = load(builder, offset(builder, line, 64, 2), _VI8, 1)
        for half in range(2):
            if half == 1:
                shifted = builder.lshr(builder.bitcast(names, _VI16), ir.Constant(_VI16, [4] * 32))
                names = builder.bitcast(shifted, _VI8)
            upper = look_up_bytes(builder, self._uppers, builder.and_(names, ir.Constant(_VI8, [15] * 64)))
            lower = load(builder, offset(builder, line, 64, half), _VI8, 1)
            for side in range(2):
                yield builder.shuffle_vector(lower, upper, ir.Constant(_VI32, interleaved(side)))


def interleaved(side: int) -> list[int]:
    """Lanes that interleave two vectors: the first (side 0) or last eight bytes of each 16."""
    return [16 * group + 8 * side + byte + 64 * of for group in range(4) for byte in range(8) for of in range(2)]


def make_decode_lines(ahead_bytes: int = 0) -> Any:
    """Makes the decoder of lines. ahead_bytes: prefetch distance from each coded line; 0: no prefetch."""

    @operation(_void, _i, _i, _i, _i)
    def decode_lines(builder: Builder, coded: Value, table: Value, num_lines: Value, lines: Value) -> None:
        """Decode lines, without patches, to `lines`."""
        decoder = Decoder(builder, table)
        zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
        with cgutils.for_range_slice(builder, zero, num_lines, one, _I64) as (j, _count):
            line, target = offset(builder, coded, CODED_LINE_BYTES, j), offset(builder, lines, LINE_BYTES, j)
            for byte in range(0, CODED_LINE_BYTES, VECTOR_BYTES) if ahead_bytes else ():
                emit_prefetch(builder, builder.add(line, ir.Constant(_I64, ahead_bytes + byte)))
            for place, vector in enumerate(decoder.vectors(line)):
                store(builder, vector, offset(builder, target, VECTOR_BYTES, place), 1)

    return decode_lines


_decode_lines = make_decode_lines()


@njit
def line_of_patch(patch):  # type: ignore[no-untyped-def]
    """Line of the chunk that the patch at an address belongs to."""
    return (load_u32(patch) & 0xFFFF) // LINE_BYTES


@njit
def decode(chunk, first, end, table, patch, end_patch, lines):  # type: ignore[no-untyped-def]
    """Decode lines [first, end) of a coded chunk, patches applied, into the plain chunk at `lines`."""
    _decode_lines(chunk + first * CODED_LINE_BYTES, table, end - first, lines + first * LINE_BYTES)
    apply_patches(patch, end_patch, lines)


@njit
def apply_patches(patch, end_patch, lines):  # type: ignore[no-untyped-def]
    """Write the upper bytes missing in the table into the plain chunk at `lines`."""
    for place in range(patch, end_patch, 4):
        _store_u8(lines + (load_u32(place) & 0xFFFF), load_u32(place) >> 16)
