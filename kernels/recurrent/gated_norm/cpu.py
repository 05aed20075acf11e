"""The gated norm on the CPU, in one call.

A group's sum: 16 running sums in ascending order, then the lanes, whatever the other groups and rows. Needs numba.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.simd import hsum, vadd, vmul, vsigmoid, vsplat
from outrider.kernels.recurrent.cpu_vectors import load16, round16, store16
from outrider.kernels.recurrent.gated_norm.arguments import ACTIVATIONS, GatedNormLayer, require_fit

_SILU = ACTIVATIONS.index("silu")
_GROUPS_PER_UNIT = 32
# elements, 100 us on one thread (gated_activation, which computes as much for each); smaller calls run on one thread
_MIN_PARALLEL_ELEMENTS = 130_000


class _Fields(NamedTuple):
    x: int
    x_stride: int
    gate: int
    gate_stride: int
    weight: int
    out: int
    num_groups: int  # of all rows
    groups_per_row: int
    weight_groups: int
    group_size: int
    is_bf16: int
    gates_first: int
    rounds_first: int
    activation: int
    eps: float


_Record, _Call = record.record_types(_Fields)


@njit
def _active(gate, activation):  # type: ignore[no-untyped-def]
    if activation == _SILU:
        return vmul(gate, vsigmoid(gate))
    return vsigmoid(gate)


@njit
def _do_group(call, group):  # type: ignore[no-untyped-def]
    size = 2 if call.is_bf16 else 4
    row, place = group // call.groups_per_row, group % call.groups_per_row
    x = call.x + row * call.x_stride + place * call.group_size * size
    gate = call.gate + row * call.gate_stride + place * call.group_size * size
    weight = call.weight + place % call.weight_groups * call.group_size * size
    out = call.out + group * call.group_size * size
    total = vsplat(np.float32(0))
    for column in range(0, call.group_size, LANES):
        at, count = column * size, call.group_size - column
        value = load16(x + at, count, call.is_bf16)
        if call.gates_first:
            value = vmul(value, _active(load16(gate + at, count, call.is_bf16), call.activation))
        total = vadd(total, vmul(value, value))
    mean = hsum(total) / np.float32(call.group_size)
    scale = vsplat(np.float32(1) / np.float32(math.sqrt(mean + np.float32(call.eps))))
    for column in range(0, call.group_size, LANES):
        at, count = column * size, call.group_size - column
        value, active = load16(x + at, count, call.is_bf16), load16(gate + at, count, call.is_bf16)
        active = _active(active, call.activation)
        if call.gates_first:
            value = vmul(value, active)
        value = vmul(value, scale)
        if call.rounds_first:
            value = round16(value, call.is_bf16)
        value = vmul(value, load16(weight + at, count, call.is_bf16))
        if call.rounds_first:
            value = round16(value, call.is_bf16)
        if not call.gates_first:
            value = vmul(value, active)
        store16(out + at, value, count, call.is_bf16)


@njit
def _do_unit(address, unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    first = unit * _GROUPS_PER_UNIT
    for group in range(first, min(first + _GROUPS_PER_UNIT, call.num_groups)):
        _do_group(call, group)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, layer: GatedNormLayer) -> torch.Tensor:
    """See `arguments.GatedNorm`; the dtype is fp32 or bf16. Raises KernelArgumentError."""
    require_fit(x, gate, layer)
    num_rows, width = x.shape
    out = x.new_empty(x.shape)
    size, groups_per_row = x.element_size(), width // layer.group_size
    call = _Record(
        x.data_ptr(), x.stride(0) * size, gate.data_ptr(), gate.stride(0) * size, layer.weight.data_ptr(),
        out.data_ptr(), num_rows * groups_per_row, groups_per_row, layer.weight.shape[0] // layer.group_size,
        layer.group_size, x.dtype == torch.bfloat16, layer.gates_first, layer.rounds_first,
        ACTIVATIONS.index(layer.activation), layer.eps,
    )  # fmt: skip
    threads = torch.get_num_threads() if x.numel() >= _MIN_PARALLEL_ELEMENTS else 1
    num_units = -(-num_rows * groups_per_row // _GROUPS_PER_UNIT)
    cpu_team.run(cpu_team.Work(_do_unit, call, (out,), (x, gate), num_units, threads))
    return out
