"""The short convolution on an NVIDIA GPU: windows, logs and convolved rows of all sessions in one launch (triton).

A program takes a tile of rows and columns. A column's sum begins with its bias and adds the taps in order, the oldest
row first: no bit depends on other columns. Other recurrences call `mixed_rows`, which also convolves the rows that are
replayed; of a slot they then read its state alone. The contents of the rows' tables are not checked. Nothing is read
back from the device, and grids follow from shapes alone: safe under CUDA graphs.

Minimum traffic of `mixed_rows` at 8 rows of 8,256 (Qwen3.5-9B) with as many log rows, bf16: 0.4 MB, less than a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer, require_fit
from outrider.kernels.recurrent.triton_functions import sigmoid
from outrider.kernels.triton_numbers import round_to

# elements of a program's tile; 8 bf16 per thread are one 16-byte load
_TILE = 1024
_MOST_ROWS = 8  # of a tile
_NUM_WARPS = 4


@triton.jit
def _raw_rows(  # type: ignore[no-untyped-def]
    raw, window, log, kept_rows, node, first, kept_start, slot_in, num_kept, columns,
    raw_stride, NUM_TAPS: tl.constexpr, NUM_CHANNELS: tl.constexpr, WIDTH: tl.constexpr, NUM_LOG_ROWS: tl.constexpr,
):  # fmt: skip
    """Raw rows [ROWS, BLOCK] in fp32: rows `node` of their sessions in the call, or, if negative, that many before it;
    zeros before a fresh session. slot_in -1 and num_kept 0 for that one."""
    place = num_kept + node
    window_row = place + NUM_TAPS - 1
    is_called = node >= 0
    is_kept = (node < 0) & (place >= 0)
    is_window = (place < 0) & (window_row >= 0) & (slot_in >= 0)
    kept = tl.load(kept_rows + kept_start + place, mask=is_kept, other=0)
    is_inside = (columns < WIDTH)[None, :]
    start = (first + node).to(tl.int64) * raw_stride
    called = tl.load(raw + start[:, None] + columns[None, :], mask=is_called[:, None] & is_inside, other=0.0)
    start = (slot_in.to(tl.int64) * NUM_LOG_ROWS + kept) * WIDTH
    logged = tl.load(log + start[:, None] + columns[None, :], mask=is_kept[:, None] & is_inside, other=0.0)
    start = (slot_in.to(tl.int64) * (NUM_TAPS - 1) + window_row) * NUM_CHANNELS
    is_channel = (columns < NUM_CHANNELS)[None, :]
    stored = tl.load(window + start[:, None] + columns[None, :], mask=is_window[:, None] & is_channel, other=0.0)
    before = tl.where(is_kept[:, None], logged.to(tl.float32), stored.to(tl.float32))
    return tl.where(is_called[:, None], called.to(tl.float32), before)


# Not specialised: these change from batch to batch and must not trigger compilation.
@triton.jit(do_not_specialize=["num_rows", "most_kept", "num_kept_places", "raw_stride"])
def _convolve(  # type: ignore[no-untyped-def]
    raw, window, log, out, taps, sessions, row_starts, num_chain_rows, parents, slots_in, kept_rows, num_kept,
    slots_out, num_rows, most_kept, num_kept_places, raw_stride, taps_stride,
    NUM_TAPS: tl.constexpr, NUM_CHANNELS: tl.constexpr, WIDTH: tl.constexpr, NUM_LOG_ROWS: tl.constexpr,
    IS_MIXED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of places for kept rows, most_kept for each session, and then of rows; blocks of columns)."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = index - num_kept_places
    is_row = (row >= 0) & (row < num_rows)
    session = tl.load(sessions + row, mask=is_row, other=-1)
    session = tl.where(row < 0, index // tl.maximum(most_kept, 1), session)
    is_used = session >= 0  # else padding
    first = tl.load(row_starts + session, mask=is_used, other=0)
    slot_in = tl.load(slots_in + session, mask=is_used, other=-1)
    count = tl.load(num_kept + session, mask=is_used & (slot_in >= 0), other=0)
    kept_start = session * most_kept
    # Places behind the kept rows have nothing to read; what becomes of them is not read either.
    own = tl.where(is_row, row - first, tl.minimum(index - kept_start - count, -1))
    # 0: the last chain row
    num_drafted = own + 1 - tl.load(num_chain_rows + session, mask=is_used & is_row, other=0)
    slot = tl.load(slots_out + session, mask=is_used, other=0).to(tl.int64)

    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = (columns < NUM_CHANNELS)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32) + tl.load(taps + columns, mask=columns < NUM_CHANNELS, other=0.0)
    value = total
    for tap in tl.static_range(NUM_TAPS):
        node = own
        for _ in tl.static_range(NUM_TAPS - 1 - tap):
            before = tl.load(parents + first + node, mask=node >= 0, other=2147483647)
            node = tl.minimum(before, node - 1)
        value = _raw_rows(
            raw, window, log, kept_rows, node, first, kept_start, slot_in, count, columns,
            raw_stride, NUM_TAPS, NUM_CHANNELS, WIDTH, NUM_LOG_ROWS,
        )  # fmt: skip
        total += value * tl.load(taps + (tap + 1) * taps_stride + columns, mask=columns < NUM_CHANNELS, other=0.0)
        if tap < NUM_TAPS - 1:
            # The taps before the last chain row's own are the window before that row.
            start = (slot * (NUM_TAPS - 1) + tap) * NUM_CHANNELS
            is_written = (is_row & is_used & (num_drafted == 0))[:, None] & is_channel
            rounded = round_to(value, window.dtype.element_ty)
            tl.store(window + start[:, None] + columns[None, :], rounded, mask=is_written)
    start = (slot * NUM_LOG_ROWS + num_drafted) * WIDTH
    is_written = (is_row & is_used & (num_drafted >= 0))[:, None] & (columns < WIDTH)[None, :]
    tl.store(log + start[:, None] + columns[None, :], round_to(value, log.dtype.element_ty), mask=is_written)
    total = round_to(total, out.dtype.element_ty)
    if IS_MIXED:
        wide = total.to(tl.float32)
        mixed = round_to(tl.where(is_channel, wide * sigmoid(wide), value), out.dtype.element_ty)
        is_written = (row < num_rows)[:, None] & (columns < WIDTH)[None, :]
        tl.store(out + index.to(tl.int64)[:, None] * WIDTH + columns[None, :], mixed, mask=is_written)
    else:
        is_written = (row < num_rows)[:, None] & is_channel
        tl.store(out + row.to(tl.int64)[:, None] * NUM_CHANNELS + columns[None, :], total, mask=is_written)


def short_conv(raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `arguments.ShortConv`; raw is fp32 or bf16. Raises KernelArgumentError."""
    out = torch.empty_like(raw, memory_format=torch.contiguous_format)
    _launch(raw, layer, states, rows, out, is_mixed=False)
    return out


def mixed_rows(raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """Convolve the first C of the raw rows' W columns, apply silu, and write windows and logs.

    Returns [N * most_kept + T, W] in the model's dtype: most_kept places for each session's kept rows, then the call's
    rows; columns from C on are raw. Raises KernelArgumentError.
    """
    out = raw.new_empty((rows.kept_rows.numel() + raw.shape[0], raw.shape[1]))
    _launch(raw, layer, states, rows, out, is_mixed=True)
    return out


def _launch(
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
    num_rows, width = raw.shape
    if num_rows == 0:
        return
    # Elements do not meet, so that no bit depends on the shape of a tile.
    row_block = min(_MOST_ROWS, triton.next_power_of_2(out.shape[0]))
    block = min(_TILE // row_block, triton.next_power_of_2(width))
    _convolve[(triton.cdiv(out.shape[0], row_block), triton.cdiv(width, block))](
        raw, states.window, states.log, out, layer.taps, rows.sessions, rows.row_starts, rows.num_chain_rows,
        rows.parents, rows.slots_in, rows.kept_rows, rows.num_kept, rows.slots_out,
        num_rows, rows.kept_rows.shape[1], out.shape[0] - num_rows, raw.stride(0), layer.taps.stride(0),
        NUM_TAPS=num_taps, NUM_CHANNELS=num_channels, WIDTH=width, NUM_LOG_ROWS=states.log.shape[1],
        IS_MIXED=is_mixed, ROWS=row_block, BLOCK=block,
        # Without fusion an element's operations are the same however the code is vectorised.
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
