"""Pieces of LLVM code on vectors of 16 floats, from which `simd.py` and the tiles make operations.

An emitter takes a builder and values, and returns a value. Each lane is computed by IEEE operations in the order
written, without fast-math. Needs llvmlite: only `cpu*.py` files import this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from llvmlite import binding, ir

LANES = 16
VECTOR_BYTES = 4 * LANES
_NON_TEMPORAL, _L2 = 0, 2  # localities, as LLVM's prefetch numbers them
F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VF32, VI16, VI32 = (ir.VectorType(element, LANES) for element in (F32, I16, I32))
BYTES = ir.VectorType(I8, VECTOR_BYTES)

Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, missing in llvmlite."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VBF16 = ir.VectorType(_BFloat(), 2 * LANES)


@functools.cache
def has_dot_pairs() -> bool:
    """Returns whether the CPU has AVX512-BF16: `dot_pairs` is one instruction."""
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


@functools.cache
def has_wide_registers() -> bool:
    """Returns whether the CPU has AVX-512: 32 registers of 16 floats; without it, 16 of eight."""
    return bool(binding.get_host_cpu_features().get("avx512bw", False))


@functools.cache
def multiplies_pairs() -> bool:
    """Returns whether `dot_pairs` is the fastest way here: with AVX512-BF16, or in two steps with AVX2's FMA.

    With AVX-512 but for BF16, which oneDNN has kernels for, two steps were never measured.
    """
    features = binding.get_host_cpu_features()
    has_two_steps = all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
    return has_dot_pairs() or (has_two_steps and not has_wide_registers())


def splat(builder: Builder, scalar: Value) -> Value:
    """The scalar in all lanes."""
    vector_type = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(builder, one, one, [0] * LANES)


def shuffle(builder: Builder, left: Value, right: Value, lanes: Sequence[int]) -> Value:
    """Lane i of the result is lane lanes[i] of (left, right) concatenated."""
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def load(builder: Builder, address: Value, element_or_vector: ir.Type, align: int) -> Value:
    """Load from an int64 address."""
    return builder.load(builder.inttoptr(address, ir.PointerType(element_or_vector)), align=align)


def store(builder: Builder, value: Value, address: Value, align: int) -> None:
    """Store to an int64 address."""
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type)), align=align)


def fma(builder: Builder, left: Value, right: Value, addend: Value) -> Value:
    """left * right + addend, rounded once."""
    function_type = ir.FunctionType(VF32, [VF32] * 3)
    function = builder.module.declare_intrinsic("llvm.fma.v16f32", fnty=function_type)
    return builder.call(function, [left, right, addend])


def halves_of_pairs(builder: Builder, pairs: Value) -> tuple[Value, Value]:
    """The two bf16 of each 32-bit lane, the lower (even) first, as floats: exact."""
    even, odd = builder.shl(pairs, ints(16)), builder.and_(pairs, ints(-(1 << 16)))
    return builder.bitcast(even, VF32), builder.bitcast(odd, VF32)


def dot_pairs(builder: Builder, total: Value, left: Value, right: Value) -> Value:
    """total + left[odd] * right[odd], + left[even] * right[even], each addition rounded.

    A product of two bf16 is exact in fp32, so FMA rounds like `vdpbf16ps`, except that it keeps denormal numbers.
    """
    if not has_dot_pairs():
        (left_even, left_odd), (right_even, right_odd) = (
            halves_of_pairs(builder, builder.bitcast(pairs, VI32)) for pairs in (left, right)
        )
        return fma(builder, left_even, right_even, fma(builder, left_odd, right_odd, total))
    function_type = ir.FunctionType(VF32, [VF32, VBF16, VBF16])
    function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=function_type)
    return builder.call(function, [total, builder.bitcast(left, VBF16), builder.bitcast(right, VBF16)])


def look_up_bytes(builder: Builder, table: Value, indices: Value) -> Value:
    """Byte i of the result is table[i // 16 * 16 + indices[i]]; indices 0 to 15; 64 bytes each."""
    names = "llvm.x86.avx512.pshuf.b.512", "llvm.x86.avx2.pshuf.b"
    return call_on_registers(builder, names, I8, [table, indices], is_wide=has_wide_registers())


def call_on_registers(
    builder: Builder, names: tuple[str, str], element: ir.Type, operands: Sequence[Value], *, is_wide: bool
) -> Value:
    """An intrinsic of vectors of 64 bytes, whose results have the elements given, or two of it on their halves.

    names: of the intrinsic for 64 bytes, and for 32. is_wide: the CPU has the former.
    """
    lanes = 8 * VECTOR_BYTES // element.width

    def call(name: str, num_lanes: int, parts: Sequence[Value]) -> Value:
        function_type = ir.FunctionType(ir.VectorType(element, num_lanes), [part.type for part in parts])
        return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), parts)

    if is_wide:
        return call(names[0], lanes, operands)
    sides = (call(names[1], lanes // 2, [_side(builder, part, side) for part in operands]) for side in (0, 1))
    return builder.shuffle_vector(*sides, _places(0, lanes))


def hidden(builder: Builder, vector: Value) -> Value:
    """The vector of 64 bytes, as one whose making LLVM cannot see: it leaves the order of additions as it is.

    Of many additions of integers it makes trees, whose parts need more registers than 16.
    """
    lanes = vector.type.count // 2
    half = ir.VectorType(vector.type.element, lanes)
    same = ir.InlineAsm(ir.FunctionType(half, [half]), "", "=x,0")
    sides = (builder.call(same, [_side(builder, vector, side)]) for side in (0, 1))
    return builder.shuffle_vector(*sides, _places(0, 2 * lanes))


def _side(builder: Builder, vector: Value, side: int) -> Value:
    """The lower or upper half of a vector."""
    lanes = vector.type.count // 2
    return builder.shuffle_vector(vector, vector, _places(side * lanes, (side + 1) * lanes))


def _places(start: int, end: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, end - start), list(range(start, end)))


def offset(builder: Builder, address: Value, byte_stride: Value | int, count: Value | int) -> Value:
    """address + byte_stride * count."""
    stride, times = (ir.Constant(I64, x) if isinstance(x, int) else x for x in (byte_stride, count))
    return builder.add(address, builder.mul(stride, times))


def floats(number: float) -> ir.Constant:
    """The number, rounded to fp32, in all lanes."""
    return ir.Constant(VF32, [number] * LANES)


def ints(number: int) -> ir.Constant:
    """The number in all 32-bit lanes."""
    return ir.Constant(VI32, [number] * LANES)


def larger(builder: Builder, left: Value, right: Value) -> Value:
    """Element-wise maximum, of vectors or scalars; right if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def widen_bf16(builder: Builder, halves: Value) -> Value:
    """bf16 bits, one in each 16-bit lane, as floats: exact."""
    return builder.bitcast(builder.shl(builder.zext(halves, VI32), ints(16)), VF32)


def exp(builder: Builder, x: Value) -> Value:
    """e^x for x <= 0, within 2 ulp; exactly 1 at 0, exactly 0 below -87.

    Cody-Waite reduction by multiples of ln 2, then the degree-6 polynomial of Cephes `expf`. The rounding constant
    leaves n in the low bits of `shifted`; shifted to the exponent, they multiply by 2^n.
    """
    floor = floats(-87.0)
    clamped = larger(builder, x, floor)
    magic = floats(1.5 * 2**23)
    shifted = fma(builder, clamped, floats(1 / math.log(2)), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, floats(-0.693359375), clamped)
    r = fma(builder, n, floats(2.12194440e-4), r)
    poly: Value = floats(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = fma(builder, poly, r, floats(coefficient))
    poly = builder.fadd(fma(builder, poly, builder.fmul(r, r), r), floats(1.0))
    exponent = builder.shl(builder.bitcast(shifted, VI32), ints(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(poly, VI32), exponent), VF32)
    return builder.select(builder.fcmp_ordered("<", x, floor), floats(0.0), scaled)


def sigmoid(builder: Builder, x: Value) -> Value:
    """1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow."""
    small = exp(builder, _negative_magnitude(builder, x))
    one = floats(1.0)
    positive = builder.fcmp_ordered(">=", x, floats(0.0))
    return builder.fdiv(builder.select(positive, one, small), builder.fadd(one, small))


def softplus(builder: Builder, x: Value) -> Value:
    """log(1 + e^x) as max(x, 0) + log1p(exp(-|x|)), within 3 ulp.

    log1p(t) = 2 artanh(t / (2 + t)); the argument is at most 1/3, and the series' first left-out term below 1e-9.
    """
    small = exp(builder, _negative_magnitude(builder, x))
    ratio = builder.fdiv(small, builder.fadd(small, floats(2.0)))
    square = builder.fmul(ratio, ratio)
    poly: Value = floats(1 / 17)
    for divisor in range(15, 1, -2):
        poly = fma(builder, poly, square, floats(1 / divisor))
    tail = builder.fmul(poly, builder.fmul(square, ratio))
    log1p = builder.fmul(builder.fadd(ratio, tail), floats(2.0))
    # NaN is in the second operand: `larger` returns it.
    return builder.fadd(larger(builder, floats(0.0), x), log1p)


def _negative_magnitude(builder: Builder, x: Value) -> Value:
    return builder.bitcast(builder.or_(builder.bitcast(x, VI32), ints(-0x80000000)), VF32)


def round_bf16(builder: Builder, value: Value) -> Value:
    """The bits of the nearest bf16 (ties to even) in the low half of each 32-bit lane; NaN stays NaN."""
    bits = builder.bitcast(value, VI32)
    upper = builder.lshr(bits, ints(16))
    rounding = builder.add(builder.and_(upper, ints(1)), ints(0x7FFF))
    rounded = builder.lshr(builder.add(bits, rounding), ints(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, builder.or_(upper, ints(0x40)), rounded)


def first_lanes(builder: Builder, count: Value) -> Value:
    """A mask of the lanes below count."""
    lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32)))


def fold(builder: Builder, value: Value, combine: Callable[[Builder, Value, Value], Value]) -> Value:
    """All lanes combined, as a tree of halves in fixed order."""
    for distance in (8, 4, 2, 1):
        moved = shuffle(builder, value, value, [(lane + distance) % LANES for lane in range(LANES)])
        value = combine(builder, value, moved)
    return builder.extract_element(value, ir.Constant(I32, 0))


def emit_prefetch(builder: Builder, address: Value, *, into_l2: bool = False) -> None:
    """Prefetch the cache line at an address; invalid addresses are allowed.

    Hint: non-temporal on AMD, so that 240 MB of weights do not evict the shared cache; L2 on Intel, which keeps few
    non-temporal lines in flight (Xeon with AMX, coded weights: 6 GB/s per core, with the L2 hint 16). into_l2: L2
    everywhere, for more lines ahead than L1 keeps: what it drops of non-temporal ones is read from memory again.
    """
    byte = ir.PointerType(ir.IntType(8))
    function_type = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=function_type)
    read, locality, data = (ir.Constant(I32, x) for x in (0, _L2 if into_l2 else _prefetch_locality(), 1))
    builder.call(function, [builder.inttoptr(address, byte), read, locality, data])


@functools.cache
def _prefetch_locality() -> int:
    is_amd = binding.get_host_cpu_features().get("sse4a", False)  # no Intel CPU has it
    return _NON_TEMPORAL if is_amd else _L2
