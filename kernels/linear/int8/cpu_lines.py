"""Lines of codes for integer products, compiled: how each kind is stored, and the code that makes bytes of it.

A line is QUAD adjacent inputs of a panel's 64 columns: 256 codes, in LLVM four vectors of 64 bytes; vector v has the
quads of columns 16 v to 16 v + 15. Bytes are unsigned: the number minus the weight's base.

    kind   bytes  content
    i4     128    64 bytes: vector 0 in the low halves, 1 in the high ones; 64 bytes: likewise 2 and 3.
                  Where not `takes_whole_lines`, 32 bytes for each vector: its first 32 in the low halves
    table  128    likewise, indices into 16 bytes
    i5     160    as i4, the lower four bits; then 8 bytes for each vector, its fifth bits
    i6     192    as i4, the lower four bits; then 64 bytes, the other two of vector v in bits 2 v and 2 v + 1
    i8     256    the bytes

Needs numba.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types

from outrider.kernels.cpu.emitters import Builder, Value, load, look_up_bytes, offset
from outrider.kernels.cpu.simd import load_u8, operation
from outrider.kernels.linear.codes import bytes_in
from outrider.kernels.linear.cpu_code_packing import slabs
from outrider.kernels.linear.cpu_panel_coding import PANEL_COLUMNS
from outrider.kernels.linear.int8.reference import QUAD

I4, TABLE, I5, I6, I8 = range(5)
# Name of each kind, from the bits of a weight and of an activation.
NAMES = ("w4a8", "w4a8", "w5a8", "w6a8", "w8a8")
LINE_BYTES = (128, 128, 160, 192, 256)
# bytes; a row's numbers of a group: step (float32), sum of its codes (int32), their product (float32)
GROUP_BYTES = 12
# number that byte 0 stands for, where bytes take the whole range
LOWEST_NUMBER = -128
_VALUES = ((I4, 16), (I5, 32), (I6, 64))
_TABLE_BYTES = 16
_VECTOR_BYTES = QUAD * 16
_HALVES_BYTES = 2 * _VECTOR_BYTES  # bytes of a line that are lower halves and upper ones
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BYTES, _WORDS, _BITS = ir.VectorType(_I8, 64), ir.VectorType(_I16, 32), ir.VectorType(ir.IntType(1), 64)
_PLACES = ir.VectorType(_I32, 64)
_HALF_OF_BYTES, _HALF_OF_WORDS = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16)
_i = types.int64


@functools.cache
def instruction() -> str | None:
    """The CPU's instruction for products of bytes, by LLVM's name of the feature; None: it has none.

    avx2: products of bytes take two or more instructions, with the same sums.
    """
    features = binding.get_host_cpu_features()
    return next((name for name in ("avx512vnni", "avxvnni", "avx2") if features.get(name)), None)


def takes_whole_lines() -> bool:
    """Returns whether products of bytes take vectors of 64 bytes, in 32 registers: a pass is over all columns."""
    return instruction() == "avx512vnni"


@operation(_i)
def lines_are_whole(_builder: Builder) -> Value:
    """A constant of the code that is compiled: 1 if `takes_whole_lines`, else 0."""
    return ir.Constant(_I64, int(takes_whole_lines()))


class LineDecoder:
    """Emits code that decodes lines of one kind."""

    def __init__(self, builder: Builder, kind: int, table: Value) -> None:
        """table: address of 16 bytes; read for the kind that has one."""
        self._builder, self._kind = builder, kind
        if kind == TABLE:
            values = load(builder, table, ir.VectorType(_I8, _TABLE_BYTES), 1)
            places = ir.Constant(_PLACES, [place % _TABLE_BYTES for place in range(64)])
            self._table = builder.shuffle_vector(values, values, places)

    def vectors(self, line: Value) -> Iterator[Value]:
        """The four vectors of the line at an address, unsigned bytes. Only where `takes_whole_lines`."""
        for vector in range(QUAD):
            if self._kind == I8:
                yield self._whole(line, vector)
            else:
                both = load(self._builder, offset(self._builder, line, _VECTOR_BYTES, vector // 2), _BYTES, 1)
                lower = self._builder.and_(self._shifted(both, 4 * (vector % 2)), _in_bytes(15))
                yield self._completed(lower, line, vector)

    def vector(self, line: Value, vector: Value) -> Value:
        """One vector of the line at an address, unsigned bytes. Only where not `takes_whole_lines`."""
        builder = self._builder
        if self._kind == I8:
            return self._whole(line, vector)
        both = load(builder, offset(builder, line, _VECTOR_BYTES // 2, vector), _HALF_OF_BYTES, 1)
        words = builder.bitcast(both, _HALF_OF_WORDS)
        high = builder.bitcast(builder.lshr(words, ir.Constant(_HALF_OF_WORDS, [4] * 16)), _HALF_OF_BYTES)
        halves = builder.shuffle_vector(both, high, ir.Constant(_PLACES, list(range(64))))
        return self._completed(builder.and_(halves, _in_bytes(15)), line, vector)

    def _whole(self, line: Value, vector: Value | int) -> Value:
        return load(self._builder, offset(self._builder, line, _VECTOR_BYTES, vector), _BYTES, 1)

    def _completed(self, lower: Value, line: Value, vector: Value | int) -> Value:
        """The bytes whose lower four bits are known."""
        if self._kind == TABLE:
            return look_up_bytes(self._builder, self._table, lower)
        if self._kind == I4:
            return lower
        upper = self._fifth(line, vector) if self._kind == I5 else self._upper(line, vector)
        return self._builder.or_(lower, upper)

    def _fifth(self, line: Value, vector: Value | int) -> Value:
        builder = self._builder
        place = offset(builder, builder.add(line, ir.Constant(_I64, _HALVES_BYTES)), 8, vector)
        bits = builder.bitcast(load(builder, place, _I64, 1), _BITS)
        return builder.select(bits, _in_bytes(16), _in_bytes(0))

    def _upper(self, line: Value, vector: Value | int) -> Value:
        builder = self._builder
        rest = load(builder, builder.add(line, ir.Constant(_I64, _HALVES_BYTES)), _BYTES, 1)
        if isinstance(vector, int):
            return builder.and_(self._shifted(rest, 2 * vector - 4), _in_bytes(48))
        bits = builder.trunc(builder.shl(vector, ir.Constant(_I64, 1)), _I16)
        by = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), bits, ir.Constant(_I32, 0))
        by = builder.shuffle_vector(by, by, ir.Constant(ir.VectorType(_I32, 32), [0] * 32))
        shifted = builder.bitcast(builder.lshr(builder.bitcast(rest, _WORDS), by), _BYTES)
        return self._shifted(builder.and_(shifted, _in_bytes(3)), -4)

    def _shifted(self, both: Value, bits: int) -> Value:
        """Bytes shifted right, left if bits is negative; those that come from a neighbour are to be masked."""
        if bits == 0:
            return both
        words, by = self._builder.bitcast(both, _WORDS), ir.Constant(_WORDS, [abs(bits)] * 32)
        shifted = self._builder.lshr(words, by) if bits > 0 else self._builder.shl(words, by)
        return self._builder.bitcast(shifted, _BYTES)


def _in_bytes(number: int) -> ir.Constant:
    return ir.Constant(_BYTES, [number] * 64)


@njit
def code_at(panel, line, number):  # type: ignore[no-untyped-def]
    """Number 0 to 255 of a line, in the order of its vectors."""
    start = panel.lines + LINE_BYTES[panel.kind] * line
    vector, place = number // _VECTOR_BYTES, number % _VECTOR_BYTES
    if panel.kind == I8:
        return types.float32(load_u8(start + number) + panel.base)
    half = _VECTOR_BYTES if lines_are_whole() else _VECTOR_BYTES // 2
    byte = load_u8(start + half * (number // (2 * half)) + number % half) >> (4 * (number // half % 2)) & 15
    if panel.kind == TABLE:
        byte = load_u8(panel.table + byte)
    elif panel.kind == I5:
        byte |= (load_u8(start + _HALVES_BYTES + 8 * vector + place // 8) >> (place % 8) & 1) << 4
    elif panel.kind == I6:
        byte |= (load_u8(start + _HALVES_BYTES + place) >> (2 * vector) & 3) << 4
    return types.float32(byte + panel.base)


def pack_lines(numbers: torch.Tensor) -> tuple[int, int, torch.Tensor | None, torch.Tensor]:
    """Numbers int8 [N, K], as bytes -> kind, base, table, lines uint8 [panels, lines, LINE_BYTES[kind]]."""
    values = sorted(byte - 256 if byte > 127 else byte for byte in bytes_in(numbers))
    kind = next((kind for kind, size in _VALUES if values[-1] - values[0] < size), I8)
    byte_of, table = (np.arange(256) - values[0]).astype(np.uint8), None
    if kind != I4 and len(values) <= _TABLE_BYTES:
        kind, table = TABLE, torch.zeros(_TABLE_BYTES, dtype=torch.uint8)
        table[: len(values)] = torch.tensor(values) - LOWEST_NUMBER
        byte_of[[value % 256 for value in values]] = np.arange(len(values))
    elif kind == I8:
        byte_of = (np.arange(256) - LOWEST_NUMBER).astype(np.uint8)
    num_panels = -(-len(numbers) // PANEL_COLUMNS)
    lines = torch.empty((num_panels, -(-numbers.shape[1] // QUAD), LINE_BYTES[kind]), dtype=torch.uint8)
    end = 0
    for slab in slabs(numbers, QUAD):
        start, end = end, end + len(slab) // PANEL_COLUMNS
        quads = torch.from_numpy(np.take(byte_of, slab.numpy())).view(-1, PANEL_COLUMNS, lines.shape[1], QUAD)
        lines[start:end] = _lines_of(kind, quads.transpose(1, 2).reshape(end - start, -1, QUAD, _VECTOR_BYTES))
    return kind, LOWEST_NUMBER if kind in (TABLE, I8) else values[0], table, lines


def _lines_of(kind: int, vectors: torch.Tensor) -> torch.Tensor:
    """uint8 [panels, lines, vectors, 64] -> [panels, lines, LINE_BYTES[kind]]"""
    if kind == I8:
        return vectors.flatten(2)
    lower = vectors & 15
    if not takes_whole_lines():
        lower = lower.reshape(*lower.shape[:2], 2 * QUAD, _VECTOR_BYTES // 2)
    halves = (lower[:, :, ::2] | lower[:, :, 1::2] << 4).flatten(2)
    if kind in (I4, TABLE):
        return halves
    upper = vectors >> 4
    if kind == I5:
        bits = upper.reshape(*upper.shape[:2], QUAD * 8, 8) << torch.arange(8, dtype=torch.uint8)
        return torch.cat((halves, bits.sum(3, dtype=torch.uint8)), 2)
    return torch.cat((halves, upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6), 2)
