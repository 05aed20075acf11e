"""One row of a recurrence whose state is a sum of outer products, for 32 columns of a head (see cpu_outer_state).

Functions of the call's record, to be compiled into its units. Needs numba.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.simd import (
    hsum,
    load_f32,
    vadd,
    vexp,
    vfma,
    vload,
    vmul,
    vsigmoid,
    vsoftplus,
    vsplat,
    vstore,
    vsub,
)
from outrider.kernels.recurrent.cpu_vectors import load16, round16, store16
from outrider.kernels.recurrent.outer_rules import DELTA, ELEMENTWISE, SELECTIVE

TILE = 2 * LANES
TILE_BYTES = 2 * VECTOR_BYTES  # of one key's row
_NORM_EPS = 1e-6  # added to the sum of squares of a query or key; transformers' l2norm


@njit
def _unit_scale(address, width):  # type: ignore[no-untyped-def]
    """Returns the factor that scales a vector of this width to length 1."""
    total = vsplat(np.float32(0))
    for column in range(0, width, LANES):
        value = load16(address + 4 * column, width - column, 0)
        total = vadd(total, vmul(value, value))
    return np.float32(1) / np.float32(math.sqrt(hsum(total) + np.float32(_NORM_EPS)))


@njit
def _prepare_keys(call, row, head, scratch):  # type: ignore[no-untyped-def]
    """Write the row's query and key to scratch."""
    first = head // call.group * call.key_dim
    query, key = row + 4 * (call.query_at + first), row + 4 * (call.key_at + first)
    query_scale, key_scale = np.float32(1), np.float32(1)
    if call.rule == DELTA:
        query_scale, key_scale = _unit_scale(query, call.key_dim), _unit_scale(key, call.key_dim)
    for column in range(0, call.key_dim, LANES):
        count = call.key_dim - column
        wide = vmul(load16(query + 4 * column, count, 0), vsplat(query_scale))
        vstore(scratch + 4 * column, vmul(wide, vsplat(np.float32(call.query_scale))))
        wide = vmul(load16(key + 4 * column, count, 0), vsplat(key_scale))
        vstore(scratch + call.padded_key_bytes + 4 * column, wide)


@njit
def _prepare_decays(call, row, head, scratch):  # type: ignore[no-untyped-def]
    """Write the row's decays to scratch, but for ELEMENTWISE; returns SELECTIVE's step size."""
    decays = scratch + 2 * call.padded_key_bytes
    steps = row + 4 * (call.step_at + head * call.decays_per_head)
    biases = call.dt_bias + 4 * head * call.decays_per_head
    rate = vsplat(load_f32(call.decay_rate + 4 * head))
    if call.decays_per_head > 1:
        for column in range(0, call.key_dim, LANES):
            count = call.key_dim - column
            step = vadd(load16(steps + 4 * column, count, 0), load16(biases + 4 * column, count, 0))
            if call.decay_bound != 0:
                share = vsigmoid(vmul(vsub(vsplat(np.float32(0)), rate), step))
                vstore(decays + 4 * column, vexp(vmul(vsplat(np.float32(call.decay_bound)), share)))
            else:
                vstore(decays + 4 * column, vexp(vmul(rate, vsoftplus(step))))
        return rate
    step = vadd(vsplat(load_f32(steps)), vsplat(load_f32(biases)))
    rounds = call.is_bf16 and call.rule == SELECTIVE
    step = round16(vsoftplus(round16(step, rounds)), rounds)
    decay = vexp(vmul(rate, step))
    for column in range(0, call.key_dim, LANES):
        vstore(decays + 4 * column, decay)
    return step


@njit
def _steps(call, row, head, first_column, scratch):  # type: ignore[no-untyped-def]
    """The step sizes of the unit's columns; DELTA has none. Writes the row's decays to scratch."""
    if call.rule != ELEMENTWISE:
        step = _prepare_decays(call, row, head, scratch)
        return step, step
    count = call.value_dim - first_column
    steps, biases = row + 4 * (call.step_at + first_column), call.dt_bias + 4 * first_column
    step0 = round16(vadd(load16(steps, count, 0), load16(biases, count, 0)), call.is_bf16)
    step0 = round16(vsoftplus(step0), call.is_bf16)
    if count <= LANES:
        return step0, step0
    steps, biases, count = steps + VECTOR_BYTES, biases + VECTOR_BYTES, count - LANES
    step1 = round16(vadd(load16(steps, count, 0), load16(biases, count, 0)), call.is_bf16)
    return step0, round16(vsoftplus(step1), call.is_bf16)


@njit
def _store_outputs(call, head, first_column, value0, value1, out0, out1, out):  # type: ignore[no-untyped-def]
    """Store the outputs, with the share of the values that skips the state added."""
    count = call.value_dim - first_column
    if call.rule == SELECTIVE:
        skip = vsplat(load_f32(call.skip + 4 * head))
        out0, out1 = vadd(out0, vmul(skip, value0)), vadd(out1, vmul(skip, value1))
    elif call.rule == ELEMENTWISE:
        skips = call.skip + 4 * first_column
        out0 = vadd(out0, vmul(load16(skips, count, 0), value0))
        if count > LANES:
            out1 = vadd(out1, vmul(load16(skips + VECTOR_BYTES, count - LANES, 0), value1))
    size = 2 if call.is_bf16 else 4
    store16(out, out0, count, call.is_bf16)
    if count > LANES:
        store16(out + LANES * size, out1, count - LANES, call.is_bf16)


@njit
def do_row(call, row, head, first_column, scratch, source, target, out):  # type: ignore[no-untyped-def]
    """S at `source` -> S after the row at `target` (may be the same), and the output; out: 0 for none."""
    _prepare_keys(call, row, head, scratch)
    queries, keys, decays = scratch, scratch + call.padded_key_bytes, scratch + 2 * call.padded_key_bytes
    value = row + 4 * (call.value_at + head * call.value_dim + first_column)
    count = call.value_dim - first_column
    value0, value1 = load16(value, count, 0), vsplat(np.float32(0))
    if count > LANES:
        value1 = load16(value + VECTOR_BYTES, count - LANES, 0)
    step0, step1 = _steps(call, row, head, first_column, scratch)
    if call.rule == DELTA:
        beta = round16(vsigmoid(vsplat(load_f32(row + 4 * (call.beta_at + head)))), call.is_bf16)
        beta = vmul(beta, vsplat(np.float32(call.beta_scale)))
        read0 = read1 = vsplat(np.float32(0))
        for index in range(call.key_dim):
            key, decay = vsplat(load_f32(keys + 4 * index)), vsplat(load_f32(decays + 4 * index))
            read0 = vfma(vmul(vload(source + TILE_BYTES * index), decay), key, read0)
            read1 = vfma(vmul(vload(source + TILE_BYTES * index + VECTOR_BYTES), decay), key, read1)
        new0, new1 = vmul(vsub(value0, read0), beta), vmul(vsub(value1, read1), beta)
    else:
        new0, new1 = vmul(step0, value0), vmul(step1, value1)
    out0 = out1 = vsplat(np.float32(0))
    for index in range(call.key_dim):
        key, query = vsplat(load_f32(keys + 4 * index)), vsplat(load_f32(queries + 4 * index))
        decay0 = decay1 = vsplat(load_f32(decays + 4 * index))
        if call.rule == ELEMENTWISE:
            rates = call.decay_rate + 4 * (index * call.value_dim + first_column)
            decay0 = vexp(vmul(step0, load16(rates, count, 0)))
            if count > LANES:
                decay1 = vexp(vmul(step1, load16(rates + VECTOR_BYTES, count - LANES, 0)))
        at = TILE_BYTES * index
        state0 = vfma(new0, key, vmul(vload(source + at), decay0))
        state1 = vfma(new1, key, vmul(vload(source + at + VECTOR_BYTES), decay1))
        vstore(target + at, state0)
        vstore(target + at + VECTOR_BYTES, state1)
        out0, out1 = vfma(state0, query, out0), vfma(state1, query, out1)
    if out != 0:
        _store_outputs(call, head, first_column, value0, value1, out0, out1, out)
