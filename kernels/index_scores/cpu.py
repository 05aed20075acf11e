"""Scores of cached keys for the choice of a sparse attention on the CPU, bitwise row-invariant.

A score's bits depend only on its query, its weights and its key: a product is one chain of additions over D, and the
heads are added one after the other. Needs numba.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.panel import make_panel, transposing_load_bf16, transposing_load_f32
from outrider.kernels.cpu.simd import (
    load_f32,
    load_i32,
    store_f32,
    store_i64,
    vadd,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
)
from outrider.kernels.errors import KernelArgumentError

_TILE = 64  # keys that a query's heads are multiplied with at a time
_TILE_BYTES = 4 * _TILE
_HEAD_BLOCK = 4  # heads of a panel
# keys of a row in a work unit: enough for one row over a long context to be work for several threads
_UNIT_KEYS = 1024
# products; smaller calls run on one thread: 30 us at most
_MIN_PARALLEL_PRODUCTS = 2_000_000
_ERRORS = {1: "a slot lies outside the cache"}
_multiply = make_panel(_HEAD_BLOCK, _TILE // LANES, accumulate=False)


class _Fields(NamedTuple):
    """Addresses, and strides in bytes."""

    query: int
    weights: int
    keys: int
    key_stride: int
    keys_are_bf16: int
    num_slots: int
    slots: int
    out: int
    num_heads: int
    head_dim: int
    num_listed: int  # L
    units_per_row: int
    scratch: int  # of the first thread: addresses int64 [TILE], keys [D, TILE], products [HEAD_BLOCK, TILE], fp32
    scratch_stride: int
    error: int  # address of an int64, set to 1 on a bad slot


_Record, _Call = record.record_types(_Fields)


@njit
def _load_keys(call, scratch, listed, num_keys):  # type: ignore[no-untyped-def]
    """Loads the listed keys, transposed; a place without a key gets one that is not used."""
    for place in range((num_keys + LANES - 1) // LANES * LANES):
        slot = load_i32(listed + 4 * place) if place < num_keys else -1
        if slot < -1 or slot >= call.num_slots:
            store_i64(call.error, 1)
            slot = 0
        store_i64(scratch + 8 * place, call.keys + max(slot, 0) * call.key_stride)
    target = scratch + 8 * _TILE
    for place in range(0, num_keys, LANES):
        for column in range(0, call.head_dim, LANES):
            d = min(column, call.head_dim - LANES)  # the last vector may overlap the previous one
            line = target + d * _TILE_BYTES + 4 * place
            if call.keys_are_bf16:
                transposing_load_bf16(scratch + 8 * place, 2 * d, line, _TILE_BYTES)
            else:
                transposing_load_f32(scratch + 8 * place, 4 * d, line, _TILE_BYTES)


@njit
def _add_heads(call, scratch, row):  # type: ignore[no-untyped-def]
    """Adds the heads' weighted products with the loaded keys; they are left where the first head's products were."""
    keys = scratch + 8 * _TILE
    products = keys + call.head_dim * _TILE_BYTES
    query = call.query + row * call.num_heads * call.head_dim * 4
    zero = vsplat(np.float32(0))
    a, b, c, d = zero, zero, zero, zero
    for first in range(0, call.num_heads, _HEAD_BLOCK):
        count = min(_HEAD_BLOCK, call.num_heads - first)
        stride = 4 * call.head_dim
        _multiply(count, query + first * stride, stride, keys, _TILE_BYTES, products, _TILE_BYTES, 0, call.head_dim)
        for head in range(count):
            weight = vsplat(load_f32(call.weights + 4 * (row * call.num_heads + first + head)))
            line = products + head * _TILE_BYTES
            a = vadd(a, vmul(weight, vmax(vload(line), zero)))
            b = vadd(b, vmul(weight, vmax(vload(line + VECTOR_BYTES), zero)))
            c = vadd(c, vmul(weight, vmax(vload(line + 2 * VECTOR_BYTES), zero)))
            d = vadd(d, vmul(weight, vmax(vload(line + 3 * VECTOR_BYTES), zero)))
    vstore(products, a)
    vstore(products + VECTOR_BYTES, b)
    vstore(products + 2 * VECTOR_BYTES, c)
    vstore(products + 3 * VECTOR_BYTES, d)
    return products


@njit
def _score_unit(address, unit, thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    scratch = call.scratch + thread * call.scratch_stride
    row, begin = unit // call.units_per_row, unit % call.units_per_row * _UNIT_KEYS
    for tile in range(begin, min(begin + _UNIT_KEYS, call.num_listed), _TILE):
        num_keys = min(_TILE, call.num_listed - tile)
        at = 4 * (row * call.num_listed + tile)
        _load_keys(call, scratch, call.slots + at, num_keys)
        scores = _add_heads(call, scratch, row)
        for place in range(num_keys):
            is_key = load_i32(call.slots + at + 4 * place) >= 0
            score = load_f32(scores + 4 * place) if is_key else np.float32(-np.inf)
            store_f32(call.out + at + 4 * place, score)


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See reference.IndexScores; keys are bf16 or fp32, D >= 16. Raises KernelArgumentError."""
    _require_fitting(query, weights, keys, slots)
    query, weights, slots = query.contiguous(), weights.contiguous(), slots.contiguous()
    num_rows, num_heads, head_dim = query.shape
    num_listed = slots.shape[1]
    out = query.new_empty(slots.shape)
    if out.numel() == 0:
        return out
    units_per_row = -(-num_listed // _UNIT_KEYS)
    num_units = num_rows * units_per_row
    is_small = out.numel() * num_heads * head_dim < _MIN_PARALLEL_PRODUCTS
    threads = 1 if is_small else min(num_units, torch.get_num_threads())
    scratch_bytes = 8 * _TILE + (head_dim + _HEAD_BLOCK) * _TILE_BYTES
    error = ctypes.c_int64()
    call = _Record(
        query.data_ptr(), weights.data_ptr(), keys.data_ptr(), keys.stride(0) * keys.element_size(),
        keys.dtype == torch.bfloat16, len(keys), slots.data_ptr(), out.data_ptr(), num_heads, head_dim, num_listed,
        units_per_row, cpu_team.scratch(scratch_bytes, threads), scratch_bytes, ctypes.addressof(error),
    )  # fmt: skip
    work = cpu_team.Work(_score_unit, call, (out,), (query, weights, keys), num_units, threads, error, _ERRORS)
    cpu_team.run(work)
    return out


def _require_fitting(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    if query.ndim != 3 or keys.ndim != 2 or slots.ndim != 2:
        raise KernelArgumentError("query must have 3 dimensions, keys and slots 2")
    num_rows, num_heads, head_dim = query.shape
    fits = weights.shape == (num_rows, num_heads) and keys.shape[1] == head_dim and len(slots) == num_rows
    if not fits or head_dim < LANES or keys.stride(1) != 1 or not len(keys):
        shapes = ", ".join(str(list(each.shape)) for each in (query, weights, keys, slots))
        raise KernelArgumentError(f"query, weights, keys and slots do not fit: {shapes}; D must be at least {LANES}")
    dtypes = (query.dtype, weights.dtype, slots.dtype)
    if dtypes != (torch.float32, torch.float32, torch.int32) or keys.dtype not in (torch.bfloat16, torch.float32):
        raise KernelArgumentError(f"query, weights, slots and keys are {dtypes} and {keys.dtype}")
    if any(each.device.type != "cpu" for each in (query, weights, keys, slots)):
        raise KernelArgumentError("all tensors must be on the CPU")
