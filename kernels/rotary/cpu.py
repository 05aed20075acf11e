"""Rotary position embedding on the CPU, in place and without temporaries: one call instead of ten torch operations.

Two multiplications and an addition per element, each rounded to the dtype, are what torch computes too: the bits
are the same. Needs numba.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numba import carray, njit

from kernels import cpu_team, record, simd
from kernels.rotary.arguments import require_fit
from kernels.simd import LANES, vadd, vload, vload_bf16, vmul, vround_bf16, vstore, vstore_bf16, vsub


class _Fields(NamedTuple):
    heads: int
    row_stride: int
    head_stride: int
    num_rows: int
    num_heads: int
    num_rotated: int
    cos: int
    sin: int
    is_bf16: int


_Record, _Call = record.record_types(_Fields)


@njit
def _rotate_bf16(first, second, cos, sin, half_bytes):  # type: ignore[no-untyped-def]
    left, right = vload_bf16(first), vload_bf16(second)
    turned = vround_bf16(vmul(left, vload_bf16(cos)))
    vstore_bf16(first, vsub(turned, vround_bf16(vmul(right, vload_bf16(sin)))))
    turned = vround_bf16(vmul(right, vload_bf16(cos + half_bytes)))
    vstore_bf16(second, vadd(turned, vround_bf16(vmul(left, vload_bf16(sin + half_bytes)))))


@njit
def _rotate_f32(first, second, cos, sin, half_bytes):  # type: ignore[no-untyped-def]
    left, right = vload(first), vload(second)
    vstore(first, vsub(vmul(left, vload(cos)), vmul(right, vload(sin))))
    vstore(second, vadd(vmul(right, vload(cos + half_bytes)), vmul(left, vload(sin + half_bytes))))


@njit
def _rotate_rows(address):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    size = 2 if call.is_bf16 else 4
    half = call.num_rotated // 2
    for row in range(call.num_rows):
        for head in range(call.num_heads):
            place = call.heads + row * call.row_stride + head * call.head_stride
            for column in range(0, half, LANES):
                first = place + column * size
                angle = (row * call.num_rotated + column) * size
                if call.is_bf16:
                    _rotate_bf16(first, first + half * size, call.cos + angle, call.sin + angle, half * size)
                else:
                    _rotate_f32(first, first + half * size, call.cos + angle, call.sin + angle, half * size)


def _make_entry(digest: int) -> Callable[[Any], None]:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            _rotate_rows(address)

    return entry


@functools.cache
def _entry() -> int:
    return cpu_team.compile_entry(_make_entry, (simd,))


def supports(num_rotated: int, dtype: torch.dtype) -> bool:
    """Whether rotate_ takes cos and sin of this width and dtype."""
    return num_rotated % (2 * LANES) == 0 and dtype in (torch.bfloat16, torch.float32)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """As `reference.rotate`, in place; R is a multiple of 32 and the elements of a head are neighbours.

    Raises KernelArgumentError.
    """
    num_rows, num_heads, _ = heads.shape
    num_rotated = cos.shape[-1]
    require_fit(heads, cos, sin, is_supported=supports(num_rotated, heads.dtype))
    cos, sin = cos.contiguous(), sin.contiguous()
    size = heads.element_size()
    call = _Record(
        heads.data_ptr(), heads.stride(0) * size, heads.stride(1) * size, num_rows, num_heads, num_rotated,
        cos.data_ptr(), sin.data_ptr(), heads.dtype == torch.bfloat16,
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(_entry(), call))
