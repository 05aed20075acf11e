"""Row gathers, concatenation, residual sums and bf16 -> fp32, as kernels of a recorded program (kernels/cpu/program).

torch computes the same bits. Needs numba.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from numba import carray, njit

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import copy_bytes, load_i64, store_i64, vadd, vload, vload_bf16, vstore, vstore_bf16


class _GatherFields(NamedTuple):
    table: int
    indices: int
    out: int
    num_indices: int
    table_rows: int
    row_bytes: int
    error: int  # address of an int64, set to 1 on a bad index


class _AddFields(NamedTuple):
    left: int
    right: int
    out: int
    num_elements: int
    is_bf16: int


class _JoinFields(NamedTuple):
    left: int
    right: int
    out: int
    num_rows: int
    left_bytes: int
    right_bytes: int


class _WidenFields(NamedTuple):
    source: int
    out: int
    num_elements: int


_GatherRecord, _Gather = record_types(_GatherFields)
_AddRecord, _Add = record_types(_AddFields)
_JoinRecord, _Join = record_types(_JoinFields)
_WidenRecord, _Widen = record_types(_WidenFields)
_ERRORS = {1: "an index lies outside the table"}


@njit
def _gather(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Gather)[0]
    for place in range(call.num_indices):
        row = load_i64(call.indices + 8 * place)
        if row < 0 or row >= call.table_rows:
            store_i64(call.error, 1)
            continue
        copy_bytes(call.out + place * call.row_bytes, call.table + row * call.row_bytes, call.row_bytes)


@njit
def _add(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Add)[0]
    for place in range(0, call.num_elements, LANES):
        if call.is_bf16:
            total = vadd(vload_bf16(call.left + 2 * place), vload_bf16(call.right + 2 * place))
            vstore_bf16(call.out + 2 * place, total)
        else:
            vstore(call.out + 4 * place, vadd(vload(call.left + 4 * place), vload(call.right + 4 * place)))


@njit
def _join(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Join)[0]
    row_bytes = call.left_bytes + call.right_bytes
    for row in range(call.num_rows):
        copy_bytes(call.out + row * row_bytes, call.left + row * call.left_bytes, call.left_bytes)
        copy_bytes(call.out + row * row_bytes + call.left_bytes, call.right + row * call.right_bytes, call.right_bytes)


@njit
def _widen(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Widen)[0]
    for place in range(0, call.num_elements, LANES):
        vstore(call.out + 4 * place, vload_bf16(call.source + 2 * place))


def takes_rows(table: torch.Tensor, indices: torch.Tensor) -> bool:
    """Returns whether gather accepts this table and these indices."""
    return table.is_contiguous() and indices.is_contiguous() and indices.dtype == torch.int64 and table.dim() > 0


def gather(table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = table[indices[i]]: table [N, ...], indices int64 of any shape, out contiguous.

    Raises KernelArgumentError for an index outside [0, N).
    """
    error = ctypes.c_int64()
    call = _GatherRecord(
        table.data_ptr(), indices.data_ptr(), out.data_ptr(), indices.numel(), table.shape[0],
        table.stride(0) * table.element_size(), ctypes.addressof(error),
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(_gather, call, (out,), (table, indices), error=error, errors=_ERRORS))


def takes_sum(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether add accepts these tensors."""
    alike = left.dtype == right.dtype and left.shape == right.shape
    fits = left.dtype in (torch.bfloat16, torch.float32) and left.numel() % LANES == 0
    return alike and fits and left.is_contiguous() and right.is_contiguous()


def add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """out = left + right, rounded once; contiguous, one shape and dtype, a multiple of 16 elements."""
    is_bf16 = left.dtype == torch.bfloat16
    call = _AddRecord(left.data_ptr(), right.data_ptr(), out.data_ptr(), left.numel(), is_bf16)
    cpu_team.run(cpu_team.Work(_add, call, (out,), (left, right)))


def takes_join(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether join accepts these tensors."""
    alike = left.dtype == right.dtype and left.dim() > 1 and left.shape[:-1] == right.shape[:-1]
    return alike and left.is_contiguous() and right.is_contiguous()


def join(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """out[..., :L] = left [..., L], out[..., L:] = right [..., R]; contiguous, one dtype."""
    left_bytes, right_bytes = (part.shape[-1] * part.element_size() for part in (left, right))
    num_rows = left.numel() // max(1, left.shape[-1])
    call = _JoinRecord(left.data_ptr(), right.data_ptr(), out.data_ptr(), num_rows, left_bytes, right_bytes)
    cpu_team.run(cpu_team.Work(_join, call, (out,), (left, right)))


def takes_widening(source: torch.Tensor) -> bool:
    """Returns whether widen accepts this tensor."""
    return source.dtype == torch.bfloat16 and source.is_contiguous() and source.numel() % LANES == 0


def widen(source: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 = source bf16, exact; contiguous, a multiple of 16 elements."""
    call = _WidenRecord(source.data_ptr(), out.data_ptr(), source.numel())
    cpu_team.run(cpu_team.Work(_widen, call, (out,), (source,)))
