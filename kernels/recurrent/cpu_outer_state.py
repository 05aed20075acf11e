"""States that are sums of outer products, on the CPU: the gated delta rule's, Mamba-2's and Mamba-1's.

Per head a state S [K, V] of keys and values. A row decays and increases it: S = D S + key u^T; its output is S^T query.
D is a number, or one for each element of the key. For the gated delta rule u = beta * (value - (D S)^T key), for
Mamba-2 u = dt * x. For Mamba-1 there is one head, dt is one for each column, and D S is elementwise.

A unit of work is 32 columns of one head of one session, through all rows of the call. Columns do not meet, and sums
over K run in ascending order: no bit depends on the division into units or calls. The unit's part of S is in scratch
memory, and so is that of every draft row, whose children start from it. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.simd import load_i32, vload, vsplat, vstore
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.recurrent.cpu_outer_row import TILE, TILE_BYTES, do_row
from outrider.kernels.recurrent.cpu_vectors import load16, store16
from outrider.kernels.recurrent.outer_rules import OuterLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows

# state elements, about 100 us on one thread (474 us for 524,288 of them, fp32, from memory and back; scratch version of
# this kernel); smaller calls run on one thread
_MIN_PARALLEL_ELEMENTS = 110_000


class _Fields(NamedTuple):
    """Addresses; strides in bytes, tensors as in `OuterLayer` and `rows`."""

    mixed: int
    mixed_stride: int
    query_at: int
    key_at: int
    value_at: int
    beta_at: int
    step_at: int
    num_kept_rows: int
    kept_starts: int
    row_starts: int
    num_chain_rows: int
    parents: int
    slots_in: int
    num_kept: int
    slots_out: int
    state: int
    slot_stride: int
    num_heads: int
    group: int  # heads per key head
    key_dim: int
    value_dim: int
    num_tiles: int
    decay_rate: int
    dt_bias: int
    skip: int
    out: int
    is_bf16: int
    rule: int
    decays_per_head: int  # 1 or key_dim
    scratch: int  # per thread: query, key and decays, fp32 [key_dim padded] each, then the tiles of S
    scratch_stride: int
    padded_key_bytes: int
    query_scale: float
    beta_scale: float
    decay_bound: float


_Record, _Call = record.record_types(_Fields)


@njit
def _load_tile(call, slot, head, first_column, tile):  # type: ignore[no-untyped-def]
    """The slot's columns of S, or zeros, to scratch."""
    count = call.value_dim - first_column
    for index in range(call.key_dim):
        state0 = state1 = vsplat(np.float32(0))
        if slot >= 0:
            row = (head * call.key_dim + index) * call.value_dim + first_column
            address = call.state + slot * call.slot_stride + 4 * row
            state0 = load16(address, count, 0)
            if count > LANES:
                state1 = load16(address + VECTOR_BYTES, count - LANES, 0)
        vstore(tile + TILE_BYTES * index, state0)
        vstore(tile + TILE_BYTES * index + VECTOR_BYTES, state1)


@njit
def _store_tile(call, slot, head, first_column, tile):  # type: ignore[no-untyped-def]
    count = call.value_dim - first_column
    for index in range(call.key_dim):
        row = (head * call.key_dim + index) * call.value_dim + first_column
        address = call.state + slot * call.slot_stride + 4 * row
        store16(address, vload(tile + TILE_BYTES * index), count, 0)
        if count > LANES:
            store16(address + VECTOR_BYTES, vload(tile + TILE_BYTES * index + VECTOR_BYTES), count - LANES, 0)


@njit
def _do_unit(address, unit, thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    session, part = unit // (call.num_heads * call.num_tiles), unit % (call.num_heads * call.num_tiles)
    head, first_column = part // call.num_tiles, part % call.num_tiles * TILE
    scratch = call.scratch + thread * call.scratch_stride
    now = scratch + 3 * call.padded_key_bytes
    tile_bytes = call.key_dim * TILE_BYTES
    slot_in = load_i32(call.slots_in + 4 * session)
    _load_tile(call, slot_in, head, first_column, now)
    if slot_in >= 0:
        first_kept = load_i32(call.kept_starts + 4 * session)
        for place in range(load_i32(call.num_kept + 4 * session)):
            row = call.mixed + (first_kept + place) * call.mixed_stride
            do_row(call, row, head, first_column, scratch, now, now, 0)
    first, last = load_i32(call.row_starts + 4 * session), load_i32(call.row_starts + 4 * session + 4)
    last_chain_row = load_i32(call.num_chain_rows + 4 * session) - 1
    size = 2 if call.is_bf16 else 4
    out_at = head * call.value_dim + first_column
    for row in range(last - first):
        source = target = now
        if row >= last_chain_row:
            target = now + (1 + row - last_chain_row) * tile_bytes
            if row == last_chain_row:
                _store_tile(call, load_i32(call.slots_out + 4 * session), head, first_column, now)
            else:
                source = now + (1 + load_i32(call.parents + 4 * (first + row)) - last_chain_row) * tile_bytes
        mixed = call.mixed + (call.num_kept_rows + first + row) * call.mixed_stride
        out = call.out + ((first + row) * call.num_heads * call.value_dim + out_at) * size
        do_row(call, mixed, head, first_column, scratch, source, target, out)


def advance(
    mixed: torch.Tensor, layer: OuterLayer, states: LayerStates, rows: RecurrentRows, dtype: torch.dtype
) -> torch.Tensor:
    """Advance the sessions' states by the mixed rows of `short_conv.cpu.mixed_rows`, which has checked `rows`.

    The result is rounded to dtype (fp32 or bf16). Raises KernelArgumentError.
    """
    _, num_heads, key_dim, value_dim = states.state.shape
    if not states.state.is_contiguous() or states.state.dtype != torch.float32:
        raise KernelArgumentError(f"states are {states.state.dtype}: they must be float32 and contiguous")
    num_sessions, num_rows = rows.slots_out.shape[0], mixed.shape[0] - rows.num_kept_rows
    out = mixed.new_empty((num_rows, num_heads * value_dim), dtype=dtype)
    num_tiles = -(-value_dim // TILE)
    is_large = num_sessions * num_heads * key_dim * value_dim >= _MIN_PARALLEL_ELEMENTS
    num_threads = torch.get_num_threads() if is_large else 1
    padded_key_bytes = VECTOR_BYTES * -(-key_dim // LANES)
    # The tiles of the session, of its last chain row and of each draft row.
    scratch_bytes = 3 * padded_key_bytes + (1 + states.log.shape[1]) * key_dim * TILE_BYTES
    call = _Record(
        mixed.data_ptr(), 4 * mixed.stride(0), *layer.columns, rows.num_kept_rows, rows.kept_starts.data_ptr(),
        rows.row_starts.data_ptr(), rows.num_chain_rows.data_ptr(), rows.parents.data_ptr(),
        rows.slots_in.data_ptr(), rows.num_kept.data_ptr(), rows.slots_out.data_ptr(),
        states.state.data_ptr(), 4 * states.state.stride(0),
        num_heads, num_heads // layer.num_key_heads, key_dim, value_dim, num_tiles,
        layer.decay_rate.data_ptr(), layer.dt_bias.data_ptr(), 0 if layer.skip is None else layer.skip.data_ptr(),
        out.data_ptr(), dtype == torch.bfloat16, layer.rule, layer.dt_bias.shape[0] // num_heads,
        cpu_team.scratch(scratch_bytes, num_threads), scratch_bytes, padded_key_bytes,
        layer.query_scale, layer.beta_scale, layer.decay_bound,
    )  # fmt: skip
    reads = (mixed, rows.kept_starts, rows.row_starts, rows.num_chain_rows, rows.parents, rows.slots_in, rows.num_kept,
             rows.slots_out)  # fmt: skip
    num_units = num_sessions * num_heads * num_tiles
    cpu_team.run(cpu_team.Work(_do_unit, call, (out, states.state), reads, num_units, num_threads))
    return out
