"""Rows before and behind integer products, compiled: inputs in 8 bits, and outputs decoded as an embedding reads them.

The law is int8.reference's. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import carray, njit, types

from outrider.kernels.cpu.emitters import (
    F32,
    I32,
    I64,
    LANES,
    VI32,
    Builder,
    Value,
    first_lanes,
    floats,
    fold,
    ints,
    splat,
    store,
)
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import (
    Vec16,
    load_i64,
    operation,
    store_f32,
    store_i64,
    vload_bf16,
    vload_bf16_first,
    vsplat,
)
from outrider.kernels.linear.cpu_code_rows import Rows, put_in_order, store_row, store_weight
from outrider.kernels.linear.cpu_code_tiles import Panel
from outrider.kernels.linear.cpu_panel_coding import PANEL_COLUMNS, pointer
from outrider.kernels.linear.int8.cpu_lines import GROUP_BYTES, code_at
from outrider.kernels.linear.int8.reference import LARGEST_CODE, QUAD, SMALLEST_MAGNITUDE

_i, _f, _v = types.int64, types.float32, Vec16()
_CODES = ir.VectorType(ir.IntType(8), LANES)
# Added to a float of at most 2**22, it leaves the nearest integer, ties to even, in the lower bits.
_ROUNDING = 1.5 * 2**23
_INFINITY_BITS = 0x7F800000


class QuantiseFields(NamedTuple):
    """Addresses, and strides in bytes."""

    x: int  # bf16 [rows, num_inputs]
    x_stride: int
    num_inputs: int
    order: int  # int64 [num_inputs]; 0: as they are
    group_inputs: int
    codes: int  # int8 [rows, codes_stride], zeros up to whole quads
    codes_stride: int
    groups: int  # [rows, groups] of GROUP_BYTES
    groups_stride: int
    scratch: int  # bf16 [num_inputs, rounded up to even] per thread; 0: as they are


QuantiseRecord, _Quantise = record_types(QuantiseFields)


@operation(_v, _v, _v)
def _larger_magnitude(builder: Builder, largest: Value, x: Value) -> Value:
    """The larger one of |x|'s bits, where NaN is above infinity."""
    bits = builder.and_(builder.bitcast(x, VI32), ints(0x7FFFFFFF))
    largest = builder.bitcast(largest, VI32)
    return builder.bitcast(builder.select(builder.icmp_signed(">", bits, largest), bits, largest), largest_type())


def largest_type() -> ir.Type:
    """Vectors of bits travel as vectors of floats."""
    return ir.VectorType(F32, LANES)


@operation(_f, _v)
def _magnitude(builder: Builder, largest: Value) -> Value:
    """The largest lane, at least SMALLEST_MAGNITUDE; NaN where it is infinite or NaN."""

    def larger(builder: Builder, left: Value, right: Value) -> Value:
        return builder.select(builder.icmp_signed(">", left, right), left, right)

    bits = fold(builder, builder.bitcast(largest, VI32), larger)
    value = builder.bitcast(bits, F32)
    floor = ir.Constant(F32, SMALLEST_MAGNITUDE)
    value = builder.select(builder.fcmp_ordered(">", floor, value), floor, value)
    is_finite = builder.icmp_signed("<", bits, ir.Constant(I32, _INFINITY_BITS))
    return builder.select(is_finite, value, ir.Constant(F32, float("nan")))


@operation(_v, _v, _f)
def _rounded(builder: Builder, x: Value, factor: Value) -> Value:
    """The integers nearest to x * factor, as bits."""
    product = builder.fmul(x, splat(builder, factor))
    bits = builder.bitcast(builder.fadd(product, floats(_ROUNDING)), VI32)
    first = builder.bitcast(floats(_ROUNDING), VI32)
    return builder.bitcast(builder.sub(bits, first), largest_type())


@operation(types.void, _i, _v)
def _store_codes(builder: Builder, address: Value, integers: Value) -> None:
    store(builder, builder.trunc(builder.bitcast(integers, VI32), _CODES), address, 1)


@operation(types.void, _i, _v, _i)
def _store_codes_first(builder: Builder, address: Value, integers: Value, count: Value) -> None:
    """Only the first count."""
    codes = builder.trunc(builder.bitcast(integers, VI32), _CODES)
    pointer, mask = builder.inttoptr(address, ir.PointerType(_CODES)), first_lanes(builder, count)
    function_type = ir.FunctionType(ir.VoidType(), [_CODES, pointer.type, I32, mask.type])
    function = builder.module.declare_intrinsic("llvm.masked.store.v16i8.p0", fnty=function_type)
    builder.call(function, [codes, pointer, ir.Constant(I32, 1), mask])


@operation(_v, _v, _v)
def _add_integers(builder: Builder, left: Value, right: Value) -> Value:
    total = builder.add(builder.bitcast(left, VI32), builder.bitcast(right, VI32))
    return builder.bitcast(total, largest_type())


@operation(_i, _v)
def _sum_of_integers(builder: Builder, integers: Value) -> Value:
    total = fold(builder, builder.bitcast(integers, VI32), lambda b, left, right: b.add(left, right))
    return builder.sext(total, I64)


@operation(types.void, _i, _i)
def _store_i32(builder: Builder, address: Value, number: Value) -> None:
    store(builder, builder.trunc(number, I32), address, 4)


@njit
def quantise_row(address, row, thread):  # type: ignore[no-untyped-def]
    """A unit of work: a row."""
    call = carray(address, 1, _Quantise)[0]
    num_inputs, size = call.num_inputs, call.group_inputs
    x = call.x + row * call.x_stride
    if call.order != 0:
        ordered = call.scratch + thread * 2 * (num_inputs + num_inputs % 2)
        put_in_order(call, x, ordered)
        x = ordered
    codes, group = call.codes + row * call.codes_stride, call.groups + row * call.groups_stride
    for first in range(0, num_inputs, size):
        _quantise_group(x + 2 * first, min(size, num_inputs - first), codes + first, group)
        group += GROUP_BYTES


@njit
def _quantise_group(x, count, codes, group):  # type: ignore[no-untyped-def]
    largest = vsplat(types.float32(0.0))
    for place in range(0, count, LANES):
        left = count - place
        values = vload_bf16(x + 2 * place) if left >= LANES else vload_bf16_first(x + 2 * place, left)
        largest = _larger_magnitude(largest, values)
    magnitude = _magnitude(largest)
    factor = types.float32(LARGEST_CODE) / magnitude
    sums = vsplat(types.float32(0.0))
    for place in range(0, count, LANES):
        left = count - place
        values = vload_bf16(x + 2 * place) if left >= LANES else vload_bf16_first(x + 2 * place, left)
        integers = _rounded(values, factor)
        if left >= LANES:
            _store_codes(codes + place, integers)
        else:
            _store_codes_first(codes + place, integers, (left + QUAD - 1) // QUAD * QUAD)
        sums = _add_integers(sums, integers)
    step, total = magnitude / types.float32(LARGEST_CODE), _sum_of_integers(sums)
    store_f32(group, step)
    _store_i32(group + 4, total)
    store_f32(group + 8, step * types.float32(total))


@njit
def decode_row(address, unit, thread):  # type: ignore[no-untyped-def]
    """A unit of work: one output's weights, as cpu_code_rows.decode_row."""
    call = carray(address, 1, Rows)[0]
    output = load_i64(call.ids + 8 * unit)
    if output < 0 or output >= call.num_outputs:
        store_i64(call.error, 1)
        return
    panel = carray(pointer(call.panels), (call.num_panels,), Panel)[output // PANEL_COLUMNS]
    column = output % PANEL_COLUMNS
    for place in range(call.num_inputs):
        line, number = place // QUAD, QUAD * column + place % QUAD
        store_weight(call, panel, thread, place, line // panel.group_lines, column, code_at(panel, line, number))
    store_row(call, unit, thread)
