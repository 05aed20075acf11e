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
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from outrider.kernels.cpu.emitters import (
    F32,
    I32,
    I64,
    LANES,
    VF32,
    VI16,
    VI32,
    Builder,
    Value,
    emit_prefetch,
    exp,
    first_lanes,
    floats,
    fma,
    fold,
    has_wide_registers,
    ints,
    larger,
    load,
    round_bf16,
    sigmoid,
    softplus,
    splat,
    store,
    widen_bf16,
)


class Vec16(types.Type):  # type: ignore[misc]
    """16 floats, in one register or, where registers are narrower, in two or four."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


@register_model(Vec16)
class _Vec16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Vec16) -> None:
        super().__init__(manager, numba_type, VF32)


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


def for_each(*numbers: Sequence[int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn an emitter (builder, *numbers, *values) into one that takes the numbers as values, out of those given."""

    def decorate(emit: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(emit)
        def choose(builder: Builder, *values: Any, depth: int = 0) -> None:
            if depth == len(numbers):
                emit(builder, *values)
                return
            done = builder.append_basic_block("done")
            cases = builder.switch(values[depth], done)
            for number in numbers[depth]:
                block = builder.append_basic_block(f"case_{number}")
                cases.add_case(ir.Constant(I64, number), block)
                with builder.goto_block(block):
                    choose(builder, *values[:depth], number, *values[depth + 1 :], depth=depth + 1)
                    builder.branch(done)
            builder.position_at_end(done)

        return choose

    return decorate


@operation(_i)
def registers_are_wide(_builder: Builder) -> Value:
    """A constant of the code that is compiled: 1 if `has_wide_registers`, else 0."""
    return ir.Constant(I64, int(has_wide_registers()))


@operation(_f, _i)
def load_f32(builder: Builder, address: Value) -> Value:
    """The float at an address."""
    return load(builder, address, F32, 4)


@operation(_void, _i, _f)
def store_f32(builder: Builder, address: Value, value: Value) -> None:
    """Store a float."""
    store(builder, value, address, 4)


@operation(_i, _i)
def load_i64(builder: Builder, address: Value) -> Value:
    """The int64 at an address."""
    return load(builder, address, I64, 8)


@operation(_void, _i, _i)
def store_i64(builder: Builder, address: Value, value: Value) -> None:
    """Store an int64."""
    store(builder, value, address, 8)


@operation(_i, _i)
def load_u8(builder: Builder, address: Value) -> Value:
    """The byte at an address, as an int64."""
    return builder.zext(load(builder, address, ir.IntType(8), 1), I64)


@operation(_i, _i)
def load_i32(builder: Builder, address: Value) -> Value:
    """The int32 at an address, as an int64."""
    return builder.sext(load(builder, address, I32, 4), I64)


@operation(_i, _i)
def next_ticket(builder: Builder, address: Value) -> Value:
    """Fetch-and-increment of an int64: each thread gets a distinct number. Orders no other memory access."""
    counter = builder.inttoptr(address, ir.PointerType(I64))
    return builder.atomic_rmw("add", counter, ir.Constant(I64, 1), "monotonic")


@operation(_void, _i)
def prefetch_into_l2(builder: Builder, address: Value) -> None:
    """Prefetch the cache line at an address into L2; invalid addresses are allowed."""
    emit_prefetch(builder, address, into_l2=True)


@operation(_void, _i, _i, _i)
def copy_bytes(builder: Builder, target: Value, source: Value, num_bytes: Value) -> None:
    """Copy num_bytes; the two ranges must not overlap."""
    byte = ir.PointerType(ir.IntType(8))
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)


@operation(_v, _i)
def vload(builder: Builder, address: Value) -> Value:
    """16 floats."""
    return load(builder, address, VF32, 4)


@operation(_v, _i)
def vload_bf16(builder: Builder, address: Value) -> Value:
    """16 bf16 as floats."""
    return widen_bf16(builder, load(builder, address, VI16, 2))


@operation(_v, _i, _i)
def vload_bf16_first(builder: Builder, address: Value, count: Value) -> Value:
    """The first count bf16 as floats, then zeros; memory past them is not read."""
    pointer, mask = builder.inttoptr(address, ir.PointerType(VI16)), first_lanes(builder, count)
    function_type = ir.FunctionType(VI16, [pointer.type, I32, mask.type, VI16])
    function = builder.module.declare_intrinsic("llvm.masked.load.v16i16.p0", fnty=function_type)
    zeros = ir.Constant(VI16, [0] * LANES)
    return widen_bf16(builder, builder.call(function, [pointer, ir.Constant(I32, 2), mask, zeros]))


@operation(_v, _i, _i)
def vload_first(builder: Builder, address: Value, count: Value) -> Value:
    """The first count floats, then zeros; memory past them is not read."""
    pointer, mask = builder.inttoptr(address, ir.PointerType(VF32)), first_lanes(builder, count)
    function_type = ir.FunctionType(VF32, [pointer.type, I32, mask.type, VF32])
    function = builder.module.declare_intrinsic("llvm.masked.load.v16f32.p0", fnty=function_type)
    return builder.call(function, [pointer, ir.Constant(I32, 4), mask, floats(0.0)])


@operation(_void, _i, _v, _i)
def vstore_first(builder: Builder, address: Value, value: Value, count: Value) -> None:
    """Store the first count of 16 floats."""
    pointer, mask = builder.inttoptr(address, ir.PointerType(VF32)), first_lanes(builder, count)
    function_type = ir.FunctionType(ir.VoidType(), [VF32, pointer.type, I32, mask.type])
    function = builder.module.declare_intrinsic("llvm.masked.store.v16f32.p0", fnty=function_type)
    builder.call(function, [value, pointer, ir.Constant(I32, 4), mask])


@operation(_void, _i, _v)
def vstore(builder: Builder, address: Value, value: Value) -> None:
    """Store 16 floats."""
    store(builder, value, address, 4)


@operation(_void, _i, _v)
def vstore_bf16(builder: Builder, address: Value, value: Value) -> None:
    """Store 16 floats rounded to the nearest bf16 (ties to even); NaN stays NaN."""
    store(builder, builder.trunc(round_bf16(builder, value), VI16), address, 2)


@operation(_void, _i, _v, _i)
def vstore_bf16_first(builder: Builder, address: Value, value: Value, count: Value) -> None:
    """Store the first count of 16 floats, rounded as by vstore_bf16."""
    numbers = builder.trunc(round_bf16(builder, value), VI16)
    pointer, mask = builder.inttoptr(address, ir.PointerType(VI16)), first_lanes(builder, count)
    function_type = ir.FunctionType(ir.VoidType(), [VI16, pointer.type, I32, mask.type])
    function = builder.module.declare_intrinsic("llvm.masked.store.v16i16.p0", fnty=function_type)
    builder.call(function, [numbers, pointer, ir.Constant(I32, 2), mask])


@operation(_v, _v)
def vround_bf16(builder: Builder, value: Value) -> Value:
    """16 floats, each rounded to the nearest bf16."""
    return builder.bitcast(builder.shl(round_bf16(builder, value), ints(16)), VF32)


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
    magnitude = builder.and_(builder.bitcast(x, VI32), ints(0x7FFFFFFF))
    sign = builder.and_(builder.bitcast(x, VI32), ints(-0x80000000))
    small = exp(builder, builder.fmul(builder.bitcast(magnitude, VF32), floats(-2.0)))
    ratio = builder.fdiv(builder.fsub(floats(1.0), small), builder.fadd(floats(1.0), small))
    return builder.bitcast(builder.or_(builder.bitcast(ratio, VI32), sign), VF32)


@operation(_v, _v, _i32, _i32)
def vkeep(builder: Builder, value: Value, first: Value, last: Value) -> Value:
    """Lanes outside [first, last) become -inf."""
    lane = ir.Constant(VI32, list(range(LANES)))
    above = builder.icmp_signed(">=", lane, splat(builder, first))
    below = builder.icmp_signed("<", lane, splat(builder, last))
    return builder.select(builder.and_(above, below), value, floats(-math.inf))


@operation(_f, _v)
def hmax(builder: Builder, value: Value) -> Value:
    """The largest lane."""
    return fold(builder, value, larger)


@operation(_f, _v)
def hsum(builder: Builder, value: Value) -> Value:
    """The sum of the lanes, as a tree of halves in fixed order."""
    return fold(builder, value, lambda b, left, right: b.fadd(left, right))
