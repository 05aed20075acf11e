"""Panels of codes, compiled: how a line of each kind is stored, and the code that makes bf16 pairs of it in registers.

A line is two adjacent inputs of the panel's 64 columns: 128 codes, in LLVM four vectors of 32 bf16; vector v has the
pairs of columns 16 v to 16 v + 15.

    kind   bytes  content
    i4     64     indices into the panel's 16 values; low nibbles for vectors 0 and 1, high for 2 and 3, in the order
                  that `vpunpcklbw` and `vpunpckhbw` undo (two vectors interleaved by eight bytes)
    i5     80     indices into 32 values: 32 words of 16 bits, number n of vectors 0, 1 and 2 in bits 0, 5 and 10 of
                  word n, the fifth bit of vector 3 in bit 15; then 16 bytes, its other bits, two numbers a byte
    i6     96     indices into 64 values: 32 words of 16 bits, number n of vectors 0 and 1 in bits 0 and 6 of word n,
                  the upper four bits of vector 3 in bits 12 to 15; then 32 bytes, vector 2 in bits 0 to 5 and the
                  other two bits of vector 3 in bits 6 and 7
    i8     128    int8, in the order of the vectors
    e4m3   128    float8_e4m3fn, likewise
    bf16   256    the decoded line

i5 and i6 look up words: `vpermw` and `vpermi2w` ignore the upper bits of an index, so that most numbers need a shift
alone. Bytes (`vpermb`) would need AVX512-VBMI, and an interleaving more.

Needs numba.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from llvmlite import ir

from outrider.kernels.cpu.emitters import (
    LANES,
    VBF16,
    VECTOR_BYTES,
    Builder,
    Value,
    has_dot_pairs,
    has_wide_registers,
    load,
    look_up_bytes,
    offset,
)
from outrider.kernels.linear.cpu_panel_coding import PANEL_COLUMNS, TABLE_BYTES, interleaved

I4, I5, I6, I8, E4M3, BF16 = range(6)
NAMES = ("i4", "i5", "i6", "i8", "e4m3", "bf16")
LINE_BYTES = (64, 80, 96, 128, 128, 256)
# kinds that look values up -> values of their tables
TABLE_VALUES = {I4: TABLE_BYTES, I5: 32, I6: 64}


def decodes(kind: int) -> bool:
    """Returns whether this CPU has the instructions that decode a kind: those of i5 and i6 are of AVX-512."""
    return kind not in (I5, I6) or has_wide_registers()


def kind_of(num_values: int) -> int:
    """Returns the smallest kind that can name `num_values` different int8 codes."""
    return next((kind for kind, most in TABLE_VALUES.items() if num_values <= most and decodes(kind)), I8)


_VECTORS = PANEL_COLUMNS // LANES
_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_VF32, _VI32, _CODES = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I8, LANES)
_BYTES, _WORDS, _PLACES = ir.VectorType(_I8, 64), ir.VectorType(_I16, 32), ir.VectorType(_I32, 64)
_WORD_BYTES = 64  # bytes of a line of i5 or i6 that are its words


def table_bytes(kind: int, values: list[float]) -> torch.Tensor:
    """uint8 [2 * TABLE_VALUES[kind]]: the values in bf16, and zeros for those that are missing.

    i4: the lower bytes of all values, then the upper ones. i5 and i6: one value after another.
    """
    table = torch.tensor(values + [0.0] * (TABLE_VALUES[kind] - len(values))).bfloat16().view(torch.uint8)
    return table.reshape(-1, 2).T.contiguous().flatten() if kind == I4 else table


class LineDecoder:
    """Emits code that decodes lines of one kind."""

    def __init__(self, builder: Builder, kind: int, table: Value) -> None:
        """table: address of the panel's table_bytes; read for the kinds that have one."""
        self._builder = builder
        self._kind = kind
        if kind == I4:
            self._tables = [self._table(offset(builder, table, TABLE_BYTES, place)) for place in range(2)]
        elif kind in (I5, I6):
            places = range(TABLE_VALUES[kind] // 32)
            self._tables = [load(builder, offset(builder, table, VECTOR_BYTES, place), _WORDS, 1) for place in places]
            name = "permvar.hi" if kind == I5 else "vpermi2var.hi"
            look_up = ir.FunctionType(_WORDS, [_WORDS] * (1 + len(places)))
            self._look_up = builder.module.declare_intrinsic(f"llvm.x86.avx512.{name}.512", fnty=look_up)
        elif kind != BF16 and has_dot_pairs():
            join = ir.FunctionType(VBF16, [_VF32, _VF32])
            self._join = builder.module.declare_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", fnty=join)

    def vectors(self, line: Value) -> Iterator[Value]:
        """The four vectors of the line at an address."""
        if self._kind == I4:
            yield from self._from_nibbles(line)
            return
        if self._kind in (I5, I6):
            for indices in self._fives(line) if self._kind == I5 else self._sixes(line):
                first, *second = self._tables
                words = self._builder.call(self._look_up, [first, indices, *second] if second else [first, indices])
                yield self._builder.bitcast(words, _VI32)
            return
        for vector in range(_VECTORS):
            if self._kind == BF16:
                yield load(self._builder, offset(self._builder, line, VECTOR_BYTES, vector), _VI32, 2)
            else:
                lower, upper = (self._floats(offset(self._builder, line, LANES, 2 * vector + i)) for i in range(2))
                yield self._joined(lower, upper)

    def _joined(self, lower: Value, upper: Value) -> Value:
        """Floats that bf16 holds exactly, as pairs: the lower 16, then the upper."""
        builder = self._builder
        if has_dot_pairs():
            return builder.bitcast(builder.call(self._join, [upper, lower]), _VI32)
        words = [builder.bitcast(floats, ir.VectorType(_I16, 2 * LANES)) for floats in (lower, upper)]
        odd = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
        return builder.bitcast(builder.shuffle_vector(*words, odd), _VI32)

    def _table(self, address: Value) -> Value:
        """The 16 bytes at an address, in each of the four lanes of `vpshufb`."""
        values = load(self._builder, address, ir.VectorType(_I8, TABLE_BYTES), 1)
        places = ir.Constant(_PLACES, [place % TABLE_BYTES for place in range(64)])
        return self._builder.shuffle_vector(values, values, places)

    def _from_nibbles(self, line: Value) -> Iterator[Value]:
        builder = self._builder
        both = load(builder, line, _BYTES, 1)
        for half in range(2):
            if half == 1:
                both = builder.bitcast(
                    builder.lshr(builder.bitcast(both, _WORDS), ir.Constant(_WORDS, [4] * 32)), _BYTES
                )
            names = builder.and_(both, ir.Constant(_BYTES, [15] * 64))
            lower, upper = (look_up_bytes(builder, table, names) for table in self._tables)
            for side in range(2):
                pairs = builder.shuffle_vector(lower, upper, ir.Constant(_PLACES, interleaved(side)))
                yield builder.bitcast(pairs, _VI32)

    def _fives(self, line: Value) -> Iterator[Value]:
        """Words whose lower five bits are the indices of a vector."""
        builder, words = self._builder, load(self._builder, line, _WORDS, 1)
        yield words
        yield builder.lshr(words, _in_words(5))
        yield builder.lshr(words, _in_words(10))
        packed = load(builder, offset(builder, line, _WORD_BYTES, 1), _CODES, 1)
        pairs = builder.zext(packed, _VI32)
        lower = builder.bitcast(builder.or_(pairs, builder.shl(pairs, _all(12))), _WORDS)
        upper = builder.lshr(words, _in_words(11))
        yield builder.or_(builder.and_(lower, _in_words(15)), builder.and_(upper, _in_words(16)))

    def _sixes(self, line: Value) -> Iterator[Value]:
        """Words whose lower six bits are the indices of a vector."""
        builder, words = self._builder, load(self._builder, line, _WORDS, 1)
        yield words
        yield builder.lshr(words, _in_words(6))
        rest = load(builder, offset(builder, line, _WORD_BYTES, 1), ir.VectorType(_I8, 32), 1)
        wide = builder.zext(rest, _WORDS)
        yield wide
        upper = builder.and_(builder.lshr(words, _in_words(10)), _in_words(60))
        yield builder.or_(upper, builder.lshr(wide, _in_words(6)))

    def _floats(self, address: Value) -> Value:
        """16 codes as floats, exactly."""
        builder = self._builder
        codes = load(builder, address, _CODES, 1)
        if self._kind == I8:
            return builder.sitofp(builder.sext(codes, _VI32), _VF32)
        # Exponent and mantissa in float32's places, with e4m3's bias 7 instead of 127.
        wide = builder.zext(codes, _VI32)
        size = builder.shl(builder.and_(wide, _all(0x7F)), _all(20))
        sign = builder.shl(builder.and_(wide, _all(0x80)), _all(24))
        biased = builder.bitcast(builder.or_(size, sign), _VF32)
        return builder.fmul(biased, ir.Constant(_VF32, [2.0**120] * LANES))


def _all(number: int) -> ir.Constant:
    return ir.Constant(_VI32, [number] * LANES)


def _in_words(number: int) -> ir.Constant:
    return ir.Constant(_WORDS, [number] * 32)


def lines_of_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [panels * 64, 2 * lines] -> uint8 [panels, lines, 128], in the order of the vectors."""
    pairs = numbers.reshape(-1, PANEL_COLUMNS, numbers.shape[1] // 2, 2)
    return pairs.transpose(1, 2).reshape(len(pairs), -1, 2 * PANEL_COLUMNS)


def lines_of_indices(kind: int, indices: torch.Tensor) -> torch.Tensor:
    """uint8 [panels, lines, 128] of indices, in the order of the vectors -> uint8 [panels, lines, LINE_BYTES[kind]]."""
    if kind == I4:
        return _lines_of_nibbles(indices)
    first, second, third, fourth = indices.reshape(*indices.shape[:2], _VECTORS, 32).unbind(2)
    # uint8 has no bits for what a shift moves beyond a byte: that is the upper byte's.
    if kind == I5:
        words = first | second << 5, second >> 3 | third << 2 | fourth >> 4 << 7
        rest = fourth[..., ::2] & 15 | fourth[..., 1::2] << 4
    else:
        words = first | second << 6, second >> 2 | fourth >> 2 << 4
        rest = third | fourth << 6
    return torch.cat((torch.stack(words, -1).flatten(-2), rest), -1)


def _lines_of_nibbles(indices: torch.Tensor) -> torch.Tensor:
    parts = indices.reshape(*indices.shape[:2], 2, 2, 4, 8)  # half, side, group of eight, byte
    in_turn = parts.transpose(3, 4).reshape(*indices.shape[:2], 2, 64)
    return in_turn[:, :, 0] | in_turn[:, :, 1] << 4
