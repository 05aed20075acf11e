"""act(gate) * up on the CPU in one pass, for any row strides.

All elements go through the same 16-lane code: their bits depend on their own gate and up alone. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.simd import vadd, vload, vload_bf16, vmul, vround_bf16, vsigmoid, vsplat, vstore, vstore_bf16
from outrider.kernels.gated_activation.arguments import require_fit
from outrider.kernels.gated_activation.reference import ACTIVATIONS

_SILU = ACTIVATIONS.index("silu")
_ROWS_PER_UNIT = 4
# elements, 100 us on one thread; smaller calls run on one thread
_MIN_PARALLEL_ELEMENTS = 130_000


class _Fields(NamedTuple):
    gate: int
    gate_stride: int
    up: int
    up_stride: int
    out: int
    num_rows: int
    width: int
    is_bf16: int
    activation: int


_Record, _Call = record.record_types(_Fields)


@njit
def _activate(x, activation):  # type: ignore[no-untyped-def]
    if activation == _SILU:
        return vmul(x, vsigmoid(x))
    # (1 + tanh y) / 2 = sigmoid(2 y), which is accurate where tanh is near -1.
    cubic = vmul(vmul(vmul(x, x), x), vsplat(0.044715))
    return vmul(x, vsigmoid(vmul(vadd(x, cubic), vsplat(2 * 0.7978845608028654))))


@njit
def _gate_rows(address, unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    size = 2 if call.is_bf16 else 4
    first = unit * _ROWS_PER_UNIT
    for row in range(first, min(first + _ROWS_PER_UNIT, call.num_rows)):
        for column in range(0, call.width, LANES):
            gate = call.gate + row * call.gate_stride + column * size
            up = call.up + row * call.up_stride + column * size
            out = call.out + (row * call.width + column) * size
            if call.is_bf16:
                active = vround_bf16(_activate(vload_bf16(gate), call.activation))
                vstore_bf16(out, vmul(active, vload_bf16(up)))
            else:
                vstore(out, vmul(_activate(vload(gate), call.activation), vload(up)))


def supports(width: int, dtype: torch.dtype) -> bool:
    """Returns whether gated_activation accepts rows of this width and dtype."""
    return width % LANES == 0 and dtype in (torch.bfloat16, torch.float32)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes `reference.gated_activation`; I is a multiple of 16, gate and up contiguous in the last dimension.

    Raises KernelArgumentError.
    """
    require_fit(gate, up, is_supported=supports(gate.shape[-1], gate.dtype))
    num_rows, width = gate.shape
    out = gate.new_empty((num_rows, width))
    size = gate.element_size()
    call = _Record(
        gate.data_ptr(), gate.stride(0) * size, up.data_ptr(), up.stride(0) * size, out.data_ptr(),
        num_rows, width, gate.dtype == torch.bfloat16, ACTIVATIONS.index(activation),
    )  # fmt: skip
    threads = torch.get_num_threads() if num_rows * width >= _MIN_PARALLEL_ELEMENTS else 1
    num_units = -(-num_rows // _ROWS_PER_UNIT)
    cpu_team.run(cpu_team.Work(_gate_rows, call, (out,), (gate, up), num_units, threads))
    return out
