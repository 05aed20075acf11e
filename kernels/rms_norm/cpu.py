"""RMS normalisation of rows on the CPU: one call instead of six torch operations.

A row's sum: 16 running sums in ascending order, then the lanes, whatever the other rows. Needs numba.
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
from outrider.kernels.cpu.simd import hsum, vadd, vload, vload_bf16, vmul, vround_bf16, vsplat, vstore, vstore_bf16
from outrider.kernels.errors import KernelArgumentError


class _Fields(NamedTuple):
    x: int
    weight: int
    out: int
    num_rows: int
    width: int
    is_bf16: int
    one_plus_weight: int
    rounds_first: int
    eps: float


_Record, _Call = record.record_types(_Fields)


@njit
def _load(address, index, is_bf16):  # type: ignore[no-untyped-def]
    if is_bf16:
        return vload_bf16(address + 2 * index)
    return vload(address + 4 * index)


@njit
def _normalise_rows(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    size = 2 if call.is_bf16 else 4
    one = vsplat(np.float32(call.one_plus_weight))
    for row in range(call.num_rows):
        x, out = call.x + row * call.width * size, call.out + row * call.width * size
        total = vsplat(np.float32(0))
        for column in range(0, call.width, LANES):
            value = _load(x, column, call.is_bf16)
            total = vadd(total, vmul(value, value))
        mean = hsum(total) / np.float32(call.width)
        scale = vsplat(np.float32(1) / np.float32(math.sqrt(mean + np.float32(call.eps))))
        for column in range(0, call.width, LANES):
            value = vmul(_load(x, column, call.is_bf16), scale)
            weight = _load(call.weight, column, call.is_bf16)
            if call.one_plus_weight:
                weight = vadd(weight, one)
            if call.is_bf16:
                if call.rounds_first:
                    value = vround_bf16(value)
                vstore_bf16(out + 2 * column, vmul(value, weight))
            else:
                vstore(out + 4 * column, vmul(value, weight))


def supports(weight: torch.Tensor) -> bool:
    """Returns whether rms_norm accepts this weight."""
    fits = weight.ndim == 1 and weight.shape[0] % LANES == 0 and weight.is_contiguous()
    return fits and weight.dtype in (torch.bfloat16, torch.float32) and weight.device.type == "cpu"


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, one_plus_weight: bool, rounds_first: bool
) -> torch.Tensor:
    """Computes `reference.rms_norm`; W is a multiple of 16, x and weight have one dtype (bf16 or fp32).

    Raises KernelArgumentError.
    """
    width = weight.shape[0]
    if x.dtype != weight.dtype or x.shape[-1] != width:
        raise KernelArgumentError(f"x {tuple(x.shape)} ({x.dtype}) does not fit weight [{width}] ({weight.dtype})")
    x = x.contiguous()
    out = torch.empty_like(x)
    is_bf16 = x.dtype == torch.bfloat16
    call = _Record(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width,
        is_bf16, one_plus_weight, rounds_first, eps,
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(_normalise_rows, call, (out,), (x,)))
    return out
