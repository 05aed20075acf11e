"""Rotary position embedding on the CPU: one call instead of ten torch operations.

Each element is two products and a sum, each rounded to the dtype: torch's bits. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.simd import copy_bytes, vadd, vload, vload_bf16, vmul, vround_bf16, vstore, vstore_bf16, vsub
from outrider.kernels.rotary.arguments import require_fit


class _Fields(NamedTuple):
    heads: int
    row_stride: int
    head_stride: int
    out: int
    num_rows: int
    num_heads: int
    head_dim: int
    num_rotated: int
    cos: int
    sin: int
    is_bf16: int


_Record, _Call = record.record_types(_Fields)


@njit
def _rotate_bf16(first, out, cos, sin, half_bytes):  # type: ignore[no-untyped-def]
    left, right = vload_bf16(first), vload_bf16(first + half_bytes)
    turned = vround_bf16(vmul(left, vload_bf16(cos)))
    vstore_bf16(out, vsub(turned, vround_bf16(vmul(right, vload_bf16(sin)))))
    turned = vround_bf16(vmul(right, vload_bf16(cos + half_bytes)))
    vstore_bf16(out + half_bytes, vadd(turned, vround_bf16(vmul(left, vload_bf16(sin + half_bytes)))))


@njit
def _rotate_f32(first, out, cos, sin, half_bytes):  # type: ignore[no-untyped-def]
    left, right = vload(first), vload(first + half_bytes)
    vstore(out, vsub(vmul(left, vload(cos)), vmul(right, vload(sin))))
    vstore(out + half_bytes, vadd(vmul(right, vload(cos + half_bytes)), vmul(left, vload(sin + half_bytes))))


@njit
def _rotate_rows(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    size = 2 if call.is_bf16 else 4
    half = call.num_rotated // 2
    num_kept = call.head_dim - call.num_rotated
    for row in range(call.num_rows):
        for head in range(call.num_heads):
            source = call.heads + row * call.row_stride + head * call.head_stride
            out = call.out + (row * call.num_heads + head) * call.head_dim * size
            for column in range(0, half, LANES):
                first, target = source + column * size, out + column * size
                angle = (row * call.num_rotated + column) * size
                if call.is_bf16:
                    _rotate_bf16(first, target, call.cos + angle, call.sin + angle, half * size)
                else:
                    _rotate_f32(first, target, call.cos + angle, call.sin + angle, half * size)
            if num_kept > 0:
                copy_bytes(out + call.num_rotated * size, source + call.num_rotated * size, num_kept * size)


def supports(num_rotated: int, dtype: torch.dtype) -> bool:
    """Returns whether rotate accepts cos and sin of this width and dtype."""
    return num_rotated % (2 * LANES) == 0 and dtype in (torch.bfloat16, torch.float32)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes `reference.rotate`; R is a multiple of 32, heads contiguous in the last dimension.

    Raises KernelArgumentError.
    """
    num_rows, num_heads, head_dim = heads.shape
    num_rotated = cos.shape[-1]
    require_fit(heads, cos, sin, is_supported=supports(num_rotated, heads.dtype))
    cos, sin = cos.contiguous(), sin.contiguous()
    out = heads.new_empty(heads.shape)
    size = heads.element_size()
    call = _Record(
        heads.data_ptr(), heads.stride(0) * size, heads.stride(1) * size, out.data_ptr(),
        num_rows, num_heads, head_dim, num_rotated, cos.data_ptr(), sin.data_ptr(), heads.dtype == torch.bfloat16,
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(_rotate_rows, call, (out,), (heads, cos, sin)))
    return out
