"""Writing keys and values into a paged cache of 8-bit codes on the CPU, compiled.

The law is that of kernels/kv_codes/reference. Needs numba.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from numba import carray, njit

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import (
    load_i64,
    store_f32,
    store_i64,
    vadd,
    vdiv,
    vload,
    vload_bf16,
    vsplat,
    vsub,
)
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes import cpu as codes
from outrider.kernels.kv_codes.cpu import (
    INT8,
    hlargest_magnitude,
    vlarger_magnitude,
    vquotient,
    vstore_e4m3,
    vstore_int8,
)
from outrider.kernels.kv_codes.layout import LARGEST_CODE, code_bytes, parts_of


class _CodeFields(NamedTuple):
    """One record for the keys, one for the values. Addresses, and strides in bytes."""

    rows: int
    row_stride: int
    row_head_stride: int
    rows_are_bf16: int
    cache: int
    block_stride: int
    cache_head_stride: int
    slot_stride: int
    at_scales: int  # from a head's codes
    cache_kind: int
    slots: int
    num_rows: int
    num_heads: int
    dim: int
    block_size: int
    num_slots: int
    error: int  # address of an int64, set to 1 on a bad slot
    largest: float  # magnitude of a code


_Record, _Write = record_types(_CodeFields)
_Records = _Record * 2
_ERRORS = {1: "a slot lies outside the cache"}


@njit
def _load(address, column, is_bf16):  # type: ignore[no-untyped-def]
    return vload_bf16(address + 2 * column) if is_bf16 else vload(address + 4 * column)


@njit
def _write_row(write, source, target, scale_at):  # type: ignore[no-untyped-def]
    """The codes and the scale of one head of one row."""
    is_bf16, dim = write.rows_are_bf16 != 0, write.dim
    magnitudes = vsplat(0.0)
    # The last vector overlaps the one before it if the head size is no multiple of 16.
    for column in range(0, dim, LANES):
        magnitudes = vlarger_magnitude(magnitudes, _load(source, min(column, dim - LANES), is_bf16))
    amax = hlargest_magnitude(magnitudes)
    # 0 is added, or NaN if amax is not finite.
    wide = vsplat(amax)
    scale = vadd(vdiv(wide, vsplat(write.largest)), vsub(wide, wide))
    for column in range(0, dim, LANES):
        place = min(column, dim - LANES)
        quotients = vquotient(_load(source, place, is_bf16), scale)
        if write.cache_kind == INT8:
            vstore_int8(target + place, quotients)
        else:
            vstore_e4m3(target + place, quotients)
    store_f32(scale_at, hlargest_magnitude(scale))


@njit
def _write_rows(write):  # type: ignore[no-untyped-def]
    for row in range(write.num_rows):
        slot = load_i64(write.slots + 8 * row)
        if slot == -1:
            continue
        if slot < 0 or slot >= write.num_slots:
            store_i64(write.error, 1)
            continue
        within = slot % write.block_size
        head = write.cache + slot // write.block_size * write.block_stride
        source = write.rows + row * write.row_stride
        for _head in range(write.num_heads):
            _write_row(write, source, head + within * write.slot_stride, head + write.at_scales + 4 * within)
            head += write.cache_head_stride
            source += write.row_head_stride


@njit
def _write_both(address, _unit, _thread):  # type: ignore[no-untyped-def]
    writes = carray(address, 2, _Write)
    _write_rows(writes[0])
    _write_rows(writes[1])


def write_codes(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes bf16 or fp32 rows into coded caches, for cpu.kv_write, which has checked the slots.

    Raises KernelArgumentError; if for a bad slot, the other rows have been written.
    """
    error = ctypes.c_int64()
    place = ctypes.addressof(error)
    records = _Records(_describe(key, key_cache, slots, place), _describe(value, value_cache, slots, place))
    writes = (*parts_of(key_cache), *parts_of(value_cache))
    cpu_team.run(cpu_team.Work(_write_both, records, writes, (key, value, slots), error=error, errors=_ERRORS))


def _describe(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, error_address: int) -> Any:
    """The record of one side, checked."""
    num_blocks, num_heads, block_size, dim = cache.shape
    if rows.shape != (slots.shape[0], num_heads, dim):
        raise KernelArgumentError(f"rows {tuple(rows.shape)} do not fit slots or cache {tuple(cache.shape)}")
    if rows.dtype not in (torch.bfloat16, torch.float32) or rows.device.type != "cpu" or cache.device.type != "cpu":
        raise KernelArgumentError(f"rows ({rows.dtype}) must be bfloat16 or float32, on the CPU like the cache")
    if rows.stride(-1) != 1 or dim < LANES:
        raise KernelArgumentError(f"rows must have at least {LANES} contiguous elements per head")
    size = rows.element_size()
    return _Record(
        rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size, rows.dtype == torch.bfloat16,
        cache.data_ptr(), *cache.stride()[:3], code_bytes(block_size, dim), codes.KINDS[cache.dtype],
        slots.data_ptr(), rows.shape[0], num_heads, dim, block_size, num_blocks * block_size, error_address,
        LARGEST_CODE[cache.dtype],
    )  # fmt: skip
