"""Vector operations on 8-bit codes for the CPU kernels: widen codes to floats, make codes of floats (`reference`).

Widening is exact. Needs numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types

from outrider.kernels.cpu.emitters import (
    I32,
    LANES,
    VF32,
    VI32,
    Builder,
    Value,
    floats,
    fold,
    ints,
    larger,
    load,
    store,
)
from outrider.kernels.cpu.panel import make_transposing_load
from outrider.kernels.cpu.simd import Vec16, operation

# Element types of a cache, as the compiled kernels number them.
FLOAT32, BFLOAT16, INT8, E4M3 = 0, 1, 2, 3
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8, torch.float8_e4m3fn: E4M3}
CODES_PER_WORD = 4
_VI8 = ir.VectorType(ir.IntType(8), LANES)
_ROUNDING = 1.5 * 2**23  # added to a number below 2^22, it leaves the nearest integer in the low bits
_v, _f, _i = Vec16(), types.float32, types.int64
_Widen = Callable[[Builder, Value, int], Value]


def _widen_int8(builder: Builder, words: Value, place: int) -> Value:
    """Byte `place` of each 32-bit lane as a float."""
    high = builder.shl(words, ints(24 - 8 * place))
    return builder.sitofp(builder.ashr(high, ints(24)), VF32)


def _widen_e4m3(builder: Builder, words: Value, place: int) -> Value:
    """Byte `place` of each 32-bit lane, an e4m3, as a float.

    A subnormal m / 8 * 2^-6 is computed as (1 + m / 8) * 2^-6 - 2^-6, which needs no fp32 subnormals.
    """
    byte = builder.lshr(words, ints(8 * place))
    magnitude = builder.and_(byte, ints(0x7F))
    shifted = builder.shl(magnitude, ints(20))
    normal = builder.bitcast(builder.add(shifted, ints(120 << 23)), VF32)
    small = builder.fsub(builder.bitcast(builder.add(shifted, ints(121 << 23)), VF32), floats(2.0**-6))
    widened = builder.select(builder.icmp_signed("<", magnitude, ints(8)), small, normal)
    sign = builder.shl(builder.and_(byte, ints(0x80)), ints(24))
    return builder.bitcast(builder.or_(builder.bitcast(widened, VI32), sign), VF32)


def _load_codes(builder: Builder, address: Value) -> Value:
    """16 codes, each in the low byte of a 32-bit lane."""
    return builder.zext(load(builder, address, _VI8, 1), VI32)


def _make_load(widen: _Widen) -> Any:
    @operation(_v, _i)
    def load_widened(builder: Builder, address: Value) -> Value:
        return widen(builder, _load_codes(builder, address), 0)

    return load_widened


def _make_transposing_load(widen: _Widen) -> Any:
    return make_transposing_load(_load_codes, lambda builder, column: [widen(builder, column, 0)])


def _make_transposing_load_words(widen: _Widen) -> Any:
    """Makes a transposing load of 64 codes of each row.

    Four codes are transposed as one word and split afterwards, which takes a quarter of the shuffles.
    """
    return make_transposing_load(
        lambda builder, address: load(builder, address, VI32, 1),
        lambda builder, word: [widen(builder, word, place) for place in range(CODES_PER_WORD)],
    )


vload_int8, vload_e4m3 = (_make_load(widen) for widen in (_widen_int8, _widen_e4m3))
transposing_load_int8, transposing_load_e4m3 = (_make_transposing_load(w) for w in (_widen_int8, _widen_e4m3))
transposing_load_int8_words, transposing_load_e4m3_words = (
    _make_transposing_load_words(widen) for widen in (_widen_int8, _widen_e4m3)
)


def _larger_bits(builder: Builder, left: Value, right: Value) -> Value:
    """The larger of two that are not negative, compared as integers: a NaN is larger than all numbers."""
    bits = VI32 if left.type == VF32 else I32
    is_larger = builder.icmp_signed(">", builder.bitcast(left, bits), builder.bitcast(right, bits))
    return builder.select(is_larger, left, right)


@operation(_v, _v, _v)
def vlarger_magnitude(builder: Builder, maximum: Value, value: Value) -> Value:
    """The larger of maximum, which is not negative, and |value|; NaN if either is."""
    magnitude = builder.and_(builder.bitcast(value, VI32), ints(0x7FFFFFFF))
    return _larger_bits(builder, maximum, builder.bitcast(magnitude, VF32))


@operation(_f, _v)
def hlargest_magnitude(builder: Builder, magnitudes: Value) -> Value:
    """The largest lane of magnitudes; NaN if one is."""
    return fold(builder, magnitudes, _larger_bits)


@operation(_v, _v, _v)
def vquotient(builder: Builder, value: Value, scale: Value) -> Value:
    """value / scale where the scale is positive, else 0."""
    is_positive = builder.fcmp_ordered(">", scale, floats(0.0))
    divisor = builder.select(is_positive, scale, floats(1.0))
    return builder.select(is_positive, builder.fdiv(value, divisor), floats(0.0))


def _limited(builder: Builder, value: Value, largest: float) -> Value:
    below = builder.select(builder.fcmp_ordered("<", value, floats(largest)), value, floats(largest))
    return larger(builder, below, floats(-largest))


@operation(types.void, _i, _v)
def vstore_int8(builder: Builder, address: Value, value: Value) -> None:
    """Store 16 numbers as int8: limited to [-127, 127], rounded to nearest, ties to even."""
    shifted = builder.fadd(_limited(builder, value, 127.0), floats(_ROUNDING))
    store(builder, builder.trunc(builder.bitcast(shifted, VI32), _VI8), address, 1)


@operation(types.void, _i, _v)
def vstore_e4m3(builder: Builder, address: Value, value: Value) -> None:
    """Store 16 numbers as e4m3: limited to [-448, 448], rounded to nearest, ties to even."""
    bits = builder.bitcast(_limited(builder, value, 448.0), VI32)
    magnitude = builder.and_(bits, ints(0x7FFFFFFF))
    # Normal: round the fraction to 3 bits, change the exponent's bias from 127 to 7.
    odd = builder.and_(builder.lshr(magnitude, ints(20)), ints(1))
    rounded = builder.lshr(builder.add(builder.add(magnitude, ints(0x7FFFF)), odd), ints(20))
    normal = builder.sub(rounded, ints(120 << 3))
    # Subnormal, below 2^-6: the number of steps of 2^-9; eight of them are the smallest normal's bits.
    steps = builder.fmul(builder.bitcast(magnitude, VF32), floats(2.0**9))
    small = builder.bitcast(builder.fadd(steps, floats(_ROUNDING)), VI32)
    is_small = builder.icmp_signed("<", magnitude, ints((127 - 6) << 23))
    code = builder.select(is_small, small, normal)
    code = builder.or_(builder.and_(code, ints(0x7F)), builder.and_(builder.lshr(bits, ints(24)), ints(0x80)))
    store(builder, builder.trunc(code, _VI8), address, 1)
