"""The short convolution on the CPU: windows, logs and convolved rows of all sessions in one call.

A column's sum begins with its bias and adds the taps in order, the oldest row first. Other recurrences call
`mixed_rows`, which also convolves the rows that are replayed; of a slot they then read its state alone. Needs numba.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.simd import load_i32, load_i64, store_i64, vadd, vload, vmul, vsigmoid, vsplat
from outrider.kernels.recurrent.cpu_vectors import load16, round16, store16
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer, require_fit

_COLUMNS_PER_UNIT = 256
# elements, 100 us on one thread (gated_activation, which computes as much for each); smaller calls run on one thread
_MIN_PARALLEL_ELEMENTS = 130_000
_ERROR_SLOT, _ERROR_ROW = 1, 2
_ERRORS = {
    _ERROR_SLOT: "a session's slot, or a kept row, is outside the states",
    _ERROR_ROW: "a session has no chain row, a parent that is no earlier row, or more drafts than its log has rows",
}


class _Fields(NamedTuple):
    """Addresses; strides in bytes, tensors as in `arguments` and `rows`."""

    raw: int
    raw_stride: int
    window: int
    window_slot_stride: int
    log: int
    log_slot_stride: int
    log_row_stride: int
    row_starts: int
    num_chain_rows: int
    parents: int
    slots_in: int
    kept_rows: int
    kept_stride: int
    num_kept: int
    slots_out: int
    kept_starts: int
    taps: int
    taps_stride: int
    num_taps: int
    num_channels: int
    width: int
    out: int  # fp32 [kept rows, then T, W padded] if is_mixed, else [T, C] in the model's dtype
    out_stride: int
    num_kept_rows: int  # of all sessions
    num_slots: int
    num_log_rows: int
    num_blocks: int  # of columns
    is_bf16: int
    is_mixed: int
    error: int
    scratch: int  # int64 [num_taps] per thread: the addresses of a row's taps, 0 for zeros
    scratch_stride: int


_Record, _Call = record.record_types(_Fields)


@njit
def _error(call, session):  # type: ignore[no-untyped-def]
    """Returns the code of the first error in a session's numbers; 0: none."""
    first, last = load_i32(call.row_starts + 4 * session), load_i32(call.row_starts + 4 * session + 4)
    num_chain = load_i32(call.num_chain_rows + 4 * session)
    slot_in, slot_out = load_i32(call.slots_in + 4 * session), load_i32(call.slots_out + 4 * session)
    if slot_in >= call.num_slots or slot_out < 0 or slot_out >= call.num_slots:
        return _ERROR_SLOT
    for place in range(load_i32(call.num_kept + 4 * session)):
        kept = load_i32(call.kept_rows + session * call.kept_stride + 4 * place)
        if kept < 0 or kept >= call.num_log_rows:
            return _ERROR_SLOT
    if num_chain < 1 or last - first < num_chain or last - first - num_chain + 1 > call.num_log_rows:
        return _ERROR_ROW
    for row in range(last - first):
        parent = load_i32(call.parents + 4 * (first + row))
        if parent >= row or parent < min(row, num_chain) - 1:
            return _ERROR_ROW
    return 0


@njit
def _find_taps(call, session, row, place, taps):  # type: ignore[no-untyped-def]
    """Write the addresses of a row's taps, the oldest first. row: -1 for kept row number `place`."""
    size = 2 if call.is_bf16 else 4
    first = load_i32(call.row_starts + 4 * session)
    slot_in = load_i32(call.slots_in + 4 * session)
    window_row = call.num_taps - 2
    for tap in range(call.num_taps - 1, -1, -1):
        address = 0
        if row >= 0:
            address = call.raw + (first + row) * call.raw_stride
            row = load_i32(call.parents + 4 * (first + row))
        elif slot_in >= 0:
            if place >= 0:
                kept = load_i32(call.kept_rows + session * call.kept_stride + 4 * place)
                address = call.log + slot_in * call.log_slot_stride + kept * call.log_row_stride
                place -= 1
            else:
                window = call.window + slot_in * call.window_slot_stride
                address = window + window_row * call.num_channels * size
                window_row -= 1
        store_i64(taps + 8 * tap, address)


@njit
def _convolve(call, taps, out, first, last):  # type: ignore[no-untyped-def]
    """Columns [first, last) of a row with these taps to out."""
    size = 2 if call.is_bf16 else 4
    for column in range(first, last, LANES):
        count = last - column
        if column >= call.num_channels:
            own = load_i64(taps + 8 * (call.num_taps - 1))
            total = load16(own + column * size, count, call.is_bf16)
        else:
            total = vload(call.taps + 4 * column)
            for tap in range(call.num_taps):
                address = load_i64(taps + 8 * tap)
                if address != 0:
                    weight = vload(call.taps + (tap + 1) * call.taps_stride + 4 * column)
                    total = vadd(total, vmul(load16(address + column * size, count, call.is_bf16), weight))
            if call.is_mixed:
                total = round16(total, call.is_bf16)
                total = round16(vmul(total, vsigmoid(total)), call.is_bf16)
        if call.is_mixed:
            store16(out + 4 * column, total, count, 0)
        else:
            store16(out + column * size, total, count, call.is_bf16)


@njit
def _write_window(call, taps, slot, first, last):  # type: ignore[no-untyped-def]
    """The taps before a row's own are the window before that row."""
    size = 2 if call.is_bf16 else 4
    for tap in range(call.num_taps - 1):
        address = load_i64(taps + 8 * tap)
        row = call.window + slot * call.window_slot_stride + tap * call.num_channels * size
        for column in range(first, last, LANES):
            value = vsplat(0.0)
            if address != 0:
                value = load16(address + column * size, last - column, call.is_bf16)
            store16(row + column * size, value, last - column, call.is_bf16)


@njit
def _do_unit(address, unit, thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    session, block = unit // call.num_blocks, unit % call.num_blocks
    error = _error(call, session)
    if error != 0:
        store_i64(call.error, error)
        return
    taps = call.scratch + thread * call.scratch_stride
    size = 2 if call.is_bf16 else 4
    # The convolution's columns and the others are never in one unit.
    blocks_of_channels = -(-call.num_channels // _COLUMNS_PER_UNIT)
    if block < blocks_of_channels:
        first_column, end = block * _COLUMNS_PER_UNIT, call.num_channels
    else:
        first_column, end = call.num_channels + (block - blocks_of_channels) * _COLUMNS_PER_UNIT, call.width
    last_column = min(first_column + _COLUMNS_PER_UNIT, end)
    num_kept = load_i32(call.num_kept + 4 * session)
    if load_i32(call.slots_in + 4 * session) < 0:
        num_kept = 0
    if call.is_mixed:
        for place in range(num_kept):
            _find_taps(call, session, -1, place, taps)
            out = call.out + (load_i32(call.kept_starts + 4 * session) + place) * call.out_stride
            _convolve(call, taps, out, first_column, last_column)
    first, last = load_i32(call.row_starts + 4 * session), load_i32(call.row_starts + 4 * session + 4)
    slot_out = load_i32(call.slots_out + 4 * session)
    last_chain_row = load_i32(call.num_chain_rows + 4 * session) - 1
    for row in range(last - first):
        _find_taps(call, session, row, num_kept - 1, taps)
        out = call.out + (call.num_kept_rows + first + row) * call.out_stride
        _convolve(call, taps, out, first_column, last_column)
        if row == last_chain_row and first_column < call.num_channels:
            _write_window(call, taps, slot_out, first_column, last_column)
        if row >= last_chain_row:
            source = call.raw + (first + row) * call.raw_stride
            target = call.log + slot_out * call.log_slot_stride + (row - last_chain_row) * call.log_row_stride
            for column in range(first_column, last_column, LANES):
                value = load16(source + column * size, last_column - column, call.is_bf16)
                store16(target + column * size, value, last_column - column, call.is_bf16)


def short_conv(raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `arguments.ShortConv`; raw is fp32 or bf16. Raises KernelArgumentError."""
    out = torch.empty_like(raw)
    _run(raw, layer, states, rows, out, is_mixed=False)
    return out


def mixed_rows(raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """Convolve the first C of the raw rows' W columns, apply silu, and write windows and logs.

    Returns fp32 [num_kept_rows + T, W padded to 16]: the kept rows of all sessions, then the call's, rounded to the
    model's dtype after the convolution and after its silu; columns from C on are raw. Raises KernelArgumentError.
    """
    num_rows = rows.num_kept_rows + raw.shape[0]
    out = raw.new_empty((num_rows, -(-raw.shape[1] // LANES) * LANES), dtype=torch.float32)
    _run(raw, layer, states, rows, out, is_mixed=True)
    return out


def _run(
    raw: torch.Tensor,
    layer: ShortConvLayer,
    states: LayerStates,
    rows: RecurrentRows,
    out: torch.Tensor,
    *,
    is_mixed: bool,
) -> None:
    require_fit(raw, layer, states)
    num_channels, num_taps = layer.weight.shape
    num_sessions, width = rows.slots_out.shape[0], raw.shape[1]
    num_blocks = -(-num_channels // _COLUMNS_PER_UNIT) - (num_channels - width) // _COLUMNS_PER_UNIT
    num_threads = torch.get_num_threads() if raw.numel() >= _MIN_PARALLEL_ELEMENTS else 1
    size, error = raw.element_size(), ctypes.c_int64(0)
    call = _Record(
        raw.data_ptr(), raw.stride(0) * size,
        states.window.data_ptr(), states.window.stride(0) * size,
        states.log.data_ptr(), states.log.stride(0) * size, states.log.stride(1) * size,
        rows.row_starts.data_ptr(), rows.num_chain_rows.data_ptr(), rows.parents.data_ptr(),
        rows.slots_in.data_ptr(), rows.kept_rows.data_ptr(), 4 * rows.kept_rows.shape[1], rows.num_kept.data_ptr(),
        rows.slots_out.data_ptr(), rows.kept_starts.data_ptr(),
        layer.taps.data_ptr(), 4 * layer.taps.stride(0), num_taps, num_channels, width,
        out.data_ptr(), out.stride(0) * out.element_size(), rows.num_kept_rows if is_mixed else 0,
        states.log.shape[0], states.log.shape[1], num_blocks,
        raw.dtype == torch.bfloat16, is_mixed, ctypes.addressof(error),
        cpu_team.scratch(64 * -(-num_taps // 8), num_threads), 64 * -(-num_taps // 8),
    )  # fmt: skip
    reads = (raw, rows.row_starts, rows.num_chain_rows, rows.parents, rows.slots_in, rows.kept_rows, rows.num_kept,
             rows.slots_out, rows.kept_starts)  # fmt: skip
    writes, num_units = (out, states.window, states.log), num_sessions * num_blocks
    cpu_team.run(cpu_team.Work(_do_unit, call, writes, reads, num_units, num_threads, error, _ERRORS))
