"""The compiled half of few-row linears: bf16 rows against panels of 64 weight columns, as oneDNN packs them.

A panel holds 64 outputs: for each pair of neighbouring inputs 64 pairs of bf16, contiguous, so that a pass over a
matrix is one stream. The AVX512-BF16 instruction `vdpbf16ps` adds, in each lane, the product of the odd and then
that of the even element of a pair to a float. The caller has made sure that the machine has it. Needs numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from kernels.simd import (
    LANES,
    VECTOR_BYTES,
    Builder,
    Value,
    floats,
    load,
    next_ticket,
    offset,
    operation,
    splat,
    store,
    vadd,
    vload,
    vload_bf16,
    vstore_bf16,
)

PANEL_COLUMNS = 64
_VECTORS = PANEL_COLUMNS // LANES
PAIR_BYTES = PANEL_COLUMNS * 4  # the pairs of two neighbouring inputs for all columns
TOTAL_BYTES = PANEL_COLUMNS * 4  # one row's sums of a panel
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF32, _VI32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_i = types.int64


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_VBF16 = ir.VectorType(_BFloat(), 2 * LANES)


def _dot_pairs(builder: Builder, total: Value, left: Value, right: Value) -> Value:
    """total + left[odd] * right[odd], + left[even] * right[even], each addition rounded."""
    function_type = ir.FunctionType(_VF32, [_VF32, _VBF16, _VBF16])
    function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=function_type)
    return builder.call(function, [total, builder.bitcast(left, _VBF16), builder.bitcast(right, _VBF16)])


def _make_block(num_rows: int) -> Any:
    """totals[r, :] = (totals[r, :] if add_to_totals else 0) + the sum over the pairs of one block of inputs."""

    @operation(types.void, _i, _i, _i, _i, _i, _i)
    def block(
        builder: Builder, x: Value, x_stride: Value, weights: Value, num_pairs: Value, totals: Value, add: Value
    ) -> None:
        cells = [(r, v) for r in range(num_rows) for v in range(_VECTORS)]
        rows = [offset(builder, x, x_stride, r) for r in range(num_rows)]
        sums = {cell: cgutils.alloca_once(builder, _VF32) for cell in cells}
        for cell in cells:
            builder.store(floats(0.0), sums[cell])
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), num_pairs, ir.Constant(_I64, 1), _I64) as (j, _n):
            line = offset(builder, weights, PAIR_BYTES, j)
            columns = [load(builder, offset(builder, line, VECTOR_BYTES, v), _VI32, 2) for v in range(_VECTORS)]
            for r in range(num_rows):
                pair = splat(builder, load(builder, offset(builder, rows[r], 4, j), _I32, 2))
                for v in range(_VECTORS):
                    builder.store(_dot_pairs(builder, builder.load(sums[r, v]), pair, columns[v]), sums[r, v])
        adds = builder.icmp_signed("!=", add, ir.Constant(_I64, 0))
        for r, v in cells:
            place = offset(builder, offset(builder, totals, TOTAL_BYTES, r), VECTOR_BYTES, v)
            fresh = builder.load(sums[r, v])
            total = builder.fadd(load(builder, place, _VF32, 4), fresh)
            store(builder, builder.select(adds, total, fresh), place, 4)

    return block


# Six rows of sums, a line of weights and one pair fill 29 of the 32 registers.
_MOST_ROWS = 6
_block_1, _block_2, _block_3, _block_4, _block_5, _block_6 = (_make_block(num_rows) for num_rows in range(1, 7))


class CallFields(NamedTuple):
    """Addresses, and strides in bytes."""

    x: int  # bf16 [rows, num_inputs]
    x_stride: int
    weights: int  # panels, one after another
    panel_stride: int
    bias: int  # bf16 [num_outputs]; 0: none
    out: int  # bf16 [rows, num_outputs]
    out_stride: int
    num_rows: int
    num_outputs: int
    num_inputs: int  # even
    block_inputs: int  # even: inputs summed up before their sum joins that of the inputs before them
    num_panels: int
    counters: int  # int64 [2]: next panel, next thread
    scratch: int  # fp32 [rows, 64] per thread
    scratch_stride: int


Call = np.dtype([(name, np.int64) for name in CallFields._fields])


@njit
def _add_rows(num_rows, x, x_stride, weights, pairs, totals, add):  # type: ignore[no-untyped-def]
    if num_rows == 1:
        _block_1(x, x_stride, weights, pairs, totals, add)
    elif num_rows == 2:
        _block_2(x, x_stride, weights, pairs, totals, add)
    elif num_rows == 3:
        _block_3(x, x_stride, weights, pairs, totals, add)
    elif num_rows == 4:
        _block_4(x, x_stride, weights, pairs, totals, add)
    elif num_rows == 5:
        _block_5(x, x_stride, weights, pairs, totals, add)
    else:
        _block_6(x, x_stride, weights, pairs, totals, add)


@njit
def _multiply(call, panel, totals):  # type: ignore[no-untyped-def]
    weights = call.weights + panel * call.panel_stride
    for first in range(0, call.num_inputs, call.block_inputs):
        pairs = min(call.block_inputs, call.num_inputs - first) // 2
        # Groups as even as possible; the weights of a block stay in the cache between them.
        num_groups = (call.num_rows + _MOST_ROWS - 1) // _MOST_ROWS
        row = 0
        for group in range(num_groups):
            end = (group + 1) * call.num_rows // num_groups
            x = call.x + row * call.x_stride + 2 * first
            place = totals + row * TOTAL_BYTES
            _add_rows(end - row, x, call.x_stride, weights, pairs, place, first)
            row = end
        weights += pairs * PAIR_BYTES


@njit
def _finish(call, panel, totals):  # type: ignore[no-untyped-def]
    """Add the bias, round, and write what of the panel's columns exists."""
    first = panel * PANEL_COLUMNS
    for row in range(call.num_rows):
        for column in range(first, min(first + PANEL_COLUMNS, call.num_outputs), LANES):
            total = vload(totals + row * TOTAL_BYTES + 4 * (column - first))
            if call.bias != 0:
                total = vadd(total, vload_bf16(call.bias + 2 * column))
            vstore_bf16(call.out + row * call.out_stride + 2 * column, total)


@njit
def run_panels(address):  # type: ignore[no-untyped-def]
    """What each thread does: panels, one after another, until none is left."""
    call = carray(address, 1, Call)[0]
    thread = next_ticket(call.counters + 8)
    totals = call.scratch + thread * call.scratch_stride
    panel = next_ticket(call.counters)
    while panel < call.num_panels:
        _multiply(call, panel, totals)
        _finish(call, panel, totals)
        panel = next_ticket(call.counters)
