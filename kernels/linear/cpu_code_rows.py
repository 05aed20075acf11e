"""Rows before and behind panels of codes, compiled: inputs put in the codes' order and summed, outputs decoded.

Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from outrider.kernels.cpu.emitters import LANES, Builder, Value, load
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import (
    hsum,
    load_f32,
    load_i64,
    load_u8,
    operation,
    store_f32,
    store_i64,
    vadd,
    vload,
    vload_bf16,
    vload_bf16_first,
    vsplat,
    vstore_bf16,
    vstore_bf16_first,
)
from outrider.kernels.linear.cpu_code_decoding import E4M3, I4, I5, I8, LINE_BYTES
from outrider.kernels.linear.cpu_code_tiles import Panel
from outrider.kernels.linear.cpu_panel_coding import PANEL_COLUMNS, pointer

_i = types.int64


class InputFields(NamedTuple):
    """Addresses, and strides in bytes."""

    x: int  # bf16 [rows, num_inputs]
    x_stride: int
    num_rows: int
    num_inputs: int
    order: int  # int64 [num_inputs]; 0: as they are
    ordered: int  # bf16 [rows, num_inputs rounded up to even]; 0: not wanted
    ordered_stride: int
    x_sums: int  # fp32 [rows, groups]; 0: not wanted
    x_sums_stride: int
    group_inputs: int


class RowFields(NamedTuple):
    """Addresses."""

    panels: int  # cpu_code_tiles.PanelFields of one weight
    num_panels: int
    ids: int  # int64 [rows]
    out: int  # bf16 [rows, num_inputs]
    num_inputs: int
    order: int  # int64 [num_inputs]; 0: as they are
    num_outputs: int
    error: int  # address of an int64, set to 1 on a bad id
    scratch: int  # fp32 [num_inputs, rounded up to whole vectors] per thread


InputRecord, Inputs = record_types(InputFields)
RowRecord, Rows = record_types(RowFields)


@operation(types.float32, _i)
def _load_f16(builder: Builder, address: Value) -> Value:
    """The float16 at an address, widened."""
    return builder.fpext(load(builder, address, ir.HalfType(), 2), ir.FloatType())


@operation(types.float32, types.uint32)
def _float_of(builder: Builder, bits: Value) -> Value:
    """The float with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@njit
def prepare_rows(address, _unit, _thread):  # type: ignore[no-untyped-def]
    """A unit of work: all rows."""
    call = carray(address, 1, Inputs)[0]
    for row in range(call.num_rows):
        x = call.x + row * call.x_stride
        if call.ordered != 0:
            ordered = call.ordered + row * call.ordered_stride
            put_in_order(call, x, ordered)
            x = ordered
        if call.x_sums != 0:
            for first in range(0, call.num_inputs, call.group_inputs):
                end = min(first + call.group_inputs, call.num_inputs)
                place = call.x_sums + row * call.x_sums_stride + 4 * (first // call.group_inputs)
                store_f32(place, _sum(x + 2 * first, end - first))


@njit
def put_in_order(call, x, ordered):  # type: ignore[no-untyped-def]
    num_inputs = call.num_inputs
    source = carray(pointer(x), (num_inputs,), np.uint16)
    target = carray(pointer(ordered), (num_inputs + num_inputs % 2,), np.uint16)
    if num_inputs % 2:
        target[num_inputs] = 0
    for place in range(num_inputs):
        target[place] = source[place if call.order == 0 else load_i64(call.order + 8 * place)]


@njit
def _sum(x, count):  # type: ignore[no-untyped-def]
    """Sixteen chains, then a tree of halves."""
    lanes = vsplat(types.float32(0.0))
    for place in range(0, count, LANES):
        left = count - place
        lanes = vadd(lanes, vload_bf16(x + 2 * place) if left >= LANES else vload_bf16_first(x + 2 * place, left))
    return hsum(lanes)


@njit
def decode_row(address, unit, thread):  # type: ignore[no-untyped-def]
    """A unit of work: one output's weights, as an embedding reads them."""
    call = carray(address, 1, Rows)[0]
    output = load_i64(call.ids + 8 * unit)
    if output < 0 or output >= call.num_outputs:
        store_i64(call.error, 1)
        return
    panel = carray(pointer(call.panels), (call.num_panels,), Panel)[output // PANEL_COLUMNS]
    column = output % PANEL_COLUMNS
    for place in range(call.num_inputs):
        line, odd = place // 2, place % 2
        store_weight(
            call, panel, thread, place, line // panel.group_lines, column, _code(panel, line, 2 * column + odd)
        )
    store_row(call, unit, thread)


@njit
def store_weight(call, panel, thread, place, group, column, code):  # type: ignore[no-untyped-def]
    """Put an input's weight where the model has the input, in the thread's scratch memory."""
    weight = code * _factor(panel, panel.scales, panel.scale_steps, group, column)
    if panel.minimums != 0:
        weight += _factor(panel, panel.minimums, panel.minimum_steps, group, column)
    values = call.scratch + thread * 4 * (call.num_inputs + -call.num_inputs % LANES)
    store_f32(values + 4 * (place if call.order == 0 else load_i64(call.order + 8 * place)), weight)


@njit
def store_row(call, unit, thread):  # type: ignore[no-untyped-def]
    """Round the thread's scratch memory to the output."""
    num_inputs = call.num_inputs
    values = call.scratch + thread * 4 * (num_inputs + -num_inputs % LANES)
    out = call.out + 2 * unit * num_inputs
    for place in range(0, num_inputs, LANES):
        left = num_inputs - place
        if left >= LANES:
            vstore_bf16(out + 2 * place, vload(values + 4 * place))
        else:
            vstore_bf16_first(out + 2 * place, vload(values + 4 * place), left)


@njit
def _factor(panel, factors, steps, group, column):  # type: ignore[no-untyped-def]
    """The scale or minimum of a group and column."""
    at = group * PANEL_COLUMNS + column
    if panel.scale_bytes == 1:
        byte = load_u8(factors + at)
        step = _load_f16(steps + 2 * ((group >> panel.step_shift) * PANEL_COLUMNS + column))
        return types.float32(byte - 256 if byte > 127 else byte) * step
    return _load_f16(factors + 2 * at) if panel.scale_bytes == 2 else load_f32(factors + 4 * at)


@njit
def _code(panel, line, number):  # type: ignore[no-untyped-def]
    """Number 0 to 127 of a line, in the order of its vectors."""
    start = panel.lines + LINE_BYTES[panel.kind] * line
    vector, place = number // 32, number % 32
    if panel.kind == I4:
        byte = load_u8(start + 16 * (place // 8) + 8 * (vector % 2) + place % 8)
        index = byte >> (4 * (vector // 2)) & 15
        return _float_of(types.uint32(load_u8(panel.table + index) << 16 | load_u8(panel.table + 16 + index) << 24))
    if panel.kind < I8:
        index = _index(panel.kind == I5, start, vector, place)
        return _float_of(types.uint32(_word(panel.table + 2 * index) << 16))
    byte = load_u8(start + number)
    if panel.kind == E4M3:
        return _float_of(types.uint32((byte & 0x7F) << 20 | (byte & 0x80) << 24)) * types.float32(2.0**120)
    return types.float32(byte - 256 if byte > 127 else byte)


@njit
def _index(has_five_bits, line, vector, place):  # type: ignore[no-untyped-def]
    """Index of number `place` of a vector, of five or six bits."""
    word = _word(line + 2 * place)
    if has_five_bits:
        if vector < 3:
            return word >> (5 * vector) & 31
        return load_u8(line + 64 + place // 2) >> (4 * (place % 2)) & 15 | word >> 11 & 16
    if vector < 2:
        return word >> (6 * vector) & 63
    rest = load_u8(line + 64 + place)
    return rest & 63 if vector == 2 else word >> 10 & 60 | rest >> 6


@operation(_i, _i)
def _word(builder: Builder, address: Value) -> Value:
    """The uint16 at an address."""
    return builder.zext(load(builder, address, ir.IntType(16), 1), ir.IntType(64))
