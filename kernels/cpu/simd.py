"""Vectors of 16 floats for numba: the machine operations that the CPU kernels are written in.

Each lane of each operation is one IEEE operation, in the order written and without fast-math. So a lane's bits do not
depend on other lanes, on the number of rows, or on the register width. (Auto-vectorised loops guarantee none of this:
their scalar tail may round differently.)

Addresses are plain int64 and unchecked. Needs numba: only `cpu*.py` files import this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
VECTOR_BYTES = 4 * LANES
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF32, _VI16, _VI32 = (ir.VectorType(element, LANES) for element in (_F32, _I16, _I32))

Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value


class Vec16(types.Type):  # type: ignore[misc]
    """16 floats, in one register or, where registers are narrower, in two or four."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


@register_model(Vec16)
class _Vec16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Vec16) -> None:
        super().__init__(manager, numba_type, _VF32)


_v, _f, _i32, _i, _void = Vec16(), types.float32, types.int32, types.int64, types.void


def operation(result: types.Type, *operands: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Turn an emitter (builder, *operand values) -> value into a function that numba code can call."""
    signature = result(*operands)

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Builder, _signature: Any, values: Sequence[Value]) -> Value:
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        # numba inspects the operands' names: wraps() shows those of emit.
        @intrinsic
        @functools.wraps(emit)
        def call(_typing_context: Any, *_operands: Any) -> Any:
            return signature, codegen

        return call

    return decorate


# ---------------------------------------------------------------- emitters: pieces of LLVM code


def splat(builder: Builder, scalar: Value) -> Value:
    """The scalar in all lanes."""
    vector_type = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return shuffle(builder, one, one, [0] * LANES)


def shuffle(builder: Builder, left: Value, right: Value, lanes: Sequence[int]) -> Value:
    """Lane i of the result is lane lanes[i] of (left, right) concatenated."""
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, LANES), list(lanes)))


def load(builder: Builder, address: Value, element_or_vector: ir.Type, align: int) -> Value:
    """Load from an int64 address."""
    return builder.load(builder.inttoptr(address, ir.PointerType(element_or_vector)), align=align)


def store(builder: Builder, value: Value, address: Value, align: int) -> None:
    """Store to an int64 address."""
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type)), align=align)


def fma(builder: Builder, left: Value, right: Value, addend: Value) -> Value:
    """left * right + addend, rounded once."""
    function_type = ir.FunctionType(_VF32, [_VF32] * 3)
    function = builder.module.declare_intrinsic("llvm.fma.v16f32", fnty=function_type)
    return builder.call(function, [left, right, addend])


def offset(builder: Builder, address: Value, byte_stride: Value | int, count: Value | int) -> Value:
    """address + byte_stride * count."""
    stride, times = (ir.Constant(_I64, x) if isinstance(x, int) else x for x in (byte_stride, count))
    return builder.add(address, builder.mul(stride, times))


def floats(number: float) -> ir.Constant:
    """The number, rounded to fp32, in all lanes."""
    return ir.Constant(_VF32, [number] * LANES)


def ints(number: int) -> ir.Constant:
    """The number in all 32-bit lanes."""
    return ir.Constant(_VI32, [number] * LANES)


def larger(builder: Builder, left: Value, right: Value) -> Value:
    """Element-wise maximum, of vectors or scalars; right if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def widen_bf16(builder: Builder, halves: Value) -> Value:
    """bf16 bits, one in each 16-bit lane, as floats: exact."""
    return builder.bitcast(builder.shl(builder.zext(halves, _VI32), ints(16)), _VF32)


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
    exponent = builder.shl(builder.bitcast(shifted, _VI32), ints(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(poly, _VI32), exponent), _VF32)
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
    return builder.bitcast(builder.or_(builder.bitcast(x, _VI32), ints(-0x80000000)), _VF32)


# ---------------------------------------------------------------- operations: callable from numba code


@operation(_f, _i)
def load_f32(builder: Builder, address: Value) -> Value:
    """The float at an address."""
    return load(builder, address, _F32, 4)


@operation(_void, _i, _f)
def store_f32(builder: Builder, address: Value, value: Value) -> None:
    """Store a float."""
    store(builder, value, address, 4)


@operation(_i, _i)
def load_i64(builder: Builder, address: Value) -> Value:
    """The int64 at an address."""
    return load(builder, address, _I64, 8)


@operation(_void, _i, _i)
def store_i64(builder: Builder, address: Value, value: Value) -> None:
    """Store an int64."""
    store(builder, value, address, 8)


@operation(_i, _i)
def load_i32(builder: Builder, address: Value) -> Value:
    """The int32 at an address, as an int64."""
    return builder.sext(load(builder, address, _I32, 4), _I64)


@operation(_i, _i)
def next_ticket(builder: Builder, address: Value) -> Value:
    """Fetch-and-increment of an int64: each thread gets a distinct number. Orders no other memory access."""
    counter = builder.inttoptr(address, ir.PointerType(_I64))
    return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "monotonic")


def emit_prefetch(builder: Builder, address: Value) -> None:
    """Prefetch the cache line at an address; invalid addresses are allowed.

    Hint: non-temporal on AMD, so that 240 MB of weights do not evict the shared cache; L2 on Intel, which keeps few
    non-temporal lines in flight (Xeon with AMX, coded weights: 6 GB/s per core, with the L2 hint 16).
    """
    byte = ir.PointerType(ir.IntType(8))
    function_type = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=function_type)
    read, locality, data = (ir.Constant(_I32, x) for x in (0, _prefetch_locality(), 1))
    builder.call(function, [builder.inttoptr(address, byte), read, locality, data])


@functools.cache
def _prefetch_locality() -> int:
    """LLVM's scale: 0 non-temporal, 2 L2, 3 L1."""
    is_amd = binding.get_host_cpu_features().get("sse4a", False)  # no Intel CPU has it
    return 0 if is_amd else 2


@operation(_void, _i)
def prefetch(builder: Builder, address: Value) -> None:
    """See emit_prefetch."""
    emit_prefetch(builder, address)


@operation(_void, _i, _i, _i)
def copy_bytes(builder: Builder, target: Value, source: Value, num_bytes: Value) -> None:
    """Copy num_bytes; the two ranges must not overlap."""
    byte = ir.PointerType(ir.IntType(8))
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)


@operation(_v, _i)
def vload(builder: Builder, address: Value) -> Value:
    """16 floats."""
    return load(builder, address, _VF32, 4)


@operation(_v, _i)
def vload_bf16(builder: Builder, address: Value) -> Value:
    """16 bf16 as floats."""
    return widen_bf16(builder, load(builder, address, _VI16, 2))


def _first_lanes(builder: Builder, count: Value) -> Value:
    lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, _I32)))


@operation(_v, _i, _i)
def vload_bf16_first(builder: Builder, address: Value, count: Value) -> Value:
    """The first count bf16 as floats, then zeros; memory past them is not read."""
    pointer, mask = builder.inttoptr(address, ir.PointerType(_VI16)), _first_lanes(builder, count)
    function_type = ir.FunctionType(_VI16, [pointer.type, _I32, mask.type, _VI16])
    function = builder.module.declare_intrinsic("llvm.masked.load.v16i16.p0", fnty=function_type)
    zeros = ir.Constant(_VI16, [0] * LANES)
    return widen_bf16(builder, builder.call(function, [pointer, ir.Constant(_I32, 2), mask, zeros]))


@operation(_v, _i, _i)
def vload_first(builder: Builder, address: Value, count: Value) -> Value:
    """The first count floats, then zeros; memory past them is not read."""
    pointer, mask = builder.inttoptr(address, ir.PointerType(_VF32)), _first_lanes(builder, count)
    function_type = ir.FunctionType(_VF32, [pointer.type, _I32, mask.type, _VF32])
    function = builder.module.declare_intrinsic("llvm.masked.load.v16f32.p0", fnty=function_type)
    return builder.call(function, [pointer, ir.Constant(_I32, 4), mask, floats(0.0)])


@operation(_void, _i, _v, _i)
def vstore_first(builder: Builder, address: Value, value: Value, count: Value) -> None:
    """Store the first count of 16 floats."""
    pointer, mask = builder.inttoptr(address, ir.PointerType(_VF32)), _first_lanes(builder, count)
    function_type = ir.FunctionType(ir.VoidType(), [_VF32, pointer.type, _I32, mask.type])
    function = builder.module.declare_intrinsic("llvm.masked.store.v16f32.p0", fnty=function_type)
    builder.call(function, [value, pointer, ir.Constant(_I32, 4), mask])


@operation(_void, _i, _v)
def vstore(builder: Builder, address: Value, value: Value) -> None:
    """Store 16 floats."""
    store(builder, value, address, 4)


def round_bf16(builder: Builder, value: Value) -> Value:
    """The bits of the nearest bf16 (ties to even) in the low half of each 32-bit lane; NaN stays NaN."""
    bits = builder.bitcast(value, _VI32)
    upper = builder.lshr(bits, ints(16))
    rounding = builder.add(builder.and_(upper, ints(1)), ints(0x7FFF))
    rounded = builder.lshr(builder.add(bits, rounding), ints(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, builder.or_(upper, ints(0x40)), rounded)


@operation(_void, _i, _v)
def vstore_bf16(builder: Builder, address: Value, value: Value) -> None:
    """Store 16 floats rounded to the nearest bf16 (ties to even); NaN stays NaN."""
    store(builder, builder.trunc(round_bf16(builder, value), _VI16), address, 2)


@operation(_void, _i, _v, _i)
def vstore_bf16_first(builder: Builder, address: Value, value: Value, count: Value) -> None:
    """As vstore_bf16, but only the first count."""
    numbers = builder.trunc(round_bf16(builder, value), _VI16)
    pointer, mask = builder.inttoptr(address, ir.PointerType(_VI16)), _first_lanes(builder, count)
    function_type = ir.FunctionType(ir.VoidType(), [_VI16, pointer.type, _I32, mask.type])
    function = builder.module.declare_intrinsic("llvm.masked.store.v16i16.p0", fnty=function_type)
    builder.call(function, [numbers, pointer, ir.Constant(_I32, 2), mask])


@operation(_v, _v)
def vround_bf16(builder: Builder, value: Value) -> Value:
    """16 floats, each rounded to the nearest bf16."""
    return builder.bitcast(builder.shl(round_bf16(builder, value), ints(16)), _VF32)


@operation(_v, _f)
def vsplat(builder: Builder, scalar: Value) -> Value:
    """The scalar in all lanes."""
    return splat(builder, scalar)


@operation(_v, _v, _v)
def vadd(builder: Builder, left: Value, right: Value) -> Value:
    """left + right."""
    return builder.fadd(left, right)


@operation(_v, _v, _v)
def vsub(builder: Builder, left: Value, right: Value) -> Value:
    """left - right."""
    return builder.fsub(left, right)


@operation(_v, _v, _v)
def vmul(builder: Builder, left: Value, right: Value) -> Value:
    """left * right."""
    return builder.fmul(left, right)


@operation(_v, _v, _v)
def vdiv(builder: Builder, left: Value, right: Value) -> Value:
    """left / right."""
    return builder.fdiv(left, right)


@operation(_v, _v, _v, _v)
def vfma(builder: Builder, left: Value, right: Value, addend: Value) -> Value:
    """left * right + addend, rounded once."""
    return fma(builder, left, right, addend)


@operation(_v, _v, _v)
def vmax(builder: Builder, left: Value, right: Value) -> Value:
    """The larger of the two."""
    return larger(builder, left, right)


@operation(_v, _v)
def vexp(builder: Builder, x: Value) -> Value:
    """e^x for x <= 0, see `exp`."""
    return exp(builder, x)


@operation(_v, _v)
def vsigmoid(builder: Builder, x: Value) -> Value:
    """See `sigmoid`."""
    return sigmoid(builder, x)


@operation(_v, _v)
def vsoftplus(builder: Builder, x: Value) -> Value:
    """See `softplus`."""
    return softplus(builder, x)


@operation(_v, _v)
def vtanh(builder: Builder, x: Value) -> Value:
    """tanh x as (1 - e) / (1 + e) with e = exp(-2|x|): absolute error about 1e-7."""
    magnitude = builder.and_(builder.bitcast(x, _VI32), ints(0x7FFFFFFF))
    sign = builder.and_(builder.bitcast(x, _VI32), ints(-0x80000000))
    small = exp(builder, builder.fmul(builder.bitcast(magnitude, _VF32), floats(-2.0)))
    ratio = builder.fdiv(builder.fsub(floats(1.0), small), builder.fadd(floats(1.0), small))
    return builder.bitcast(builder.or_(builder.bitcast(ratio, _VI32), sign), _VF32)


@operation(_v, _v, _i32, _i32)
def vkeep(builder: Builder, value: Value, first: Value, last: Value) -> Value:
    """Lanes outside [first, last) become -inf."""
    lane = ir.Constant(_VI32, list(range(LANES)))
    above = builder.icmp_signed(">=", lane, splat(builder, first))
    below = builder.icmp_signed("<", lane, splat(builder, last))
    return builder.select(builder.and_(above, below), value, floats(-math.inf))


def _fold(builder: Builder, value: Value, combine: Callable[[Builder, Value, Value], Value]) -> Value:
    for distance in (8, 4, 2, 1):
        moved = shuffle(builder, value, value, [(lane + distance) % LANES for lane in range(LANES)])
        value = combine(builder, value, moved)
    return builder.extract_element(value, ir.Constant(_I32, 0))


@operation(_f, _v)
def hmax(builder: Builder, value: Value) -> Value:
    """The largest lane."""
    return _fold(builder, value, larger)


@operation(_f, _v)
def hsum(builder: Builder, value: Value) -> Value:
    """The sum of the lanes, as a tree of halves in fixed order."""
    return _fold(builder, value, lambda b, left, right: b.fadd(left, right))
