"""States that are sums of outer products, on an NVIDIA GPU: the gated delta rule's, Mamba-2's and Mamba-1's (triton).

Per head a state S [K, V]; what a row does to it is in `cpu_outer_state`. A program has some columns of one head of one
session in registers and takes all rows of the call through them, in order. Columns do not meet, and the sums over K are
those of one and the same instruction sequence: there is one loop, for replayed, committed and draft rows, so that no
bit depends on which of them a row is, or on the call.

A draft row starts from its parent's state. Most rows' parent is the row before, whose state is at hand; otherwise the
state after the last committed row, which is kept in registers too, is taken through the rows on the path once more: the
same code on the same numbers. That needs no memory per draft row. A chain costs nothing, a tree of n nodes with paths
of d at most n * d rows. Grids follow from shapes alone and nothing is read back: safe under CUDA graphs.

Minimum traffic of one row: S read and written, 4 MiB at Hv 32, dk = dv = 128: 1.3 us at 3.35 TB/s (H100), 0.9 us at
4.8 TB/s (H200), a layer and session. Rows of a prompt wait for each other: about a round trip to L2 and two sums over K
each; that was not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.recurrent.outer_rules import ELEMENTWISE, Columns, OuterLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.triton_functions import parent_of
from outrider.kernels.recurrent.triton_outer_rows import ReadyRows, prepare
from outrider.kernels.triton_numbers import round_to

# elements; a program's part of S: 32 fp32 registers per thread at 4 warps, and 32 more for the kept state
_TILE = 4096
_MOST_COLUMNS, _FEWEST_COLUMNS = 128, 16


# Not specialised: these change from batch to batch and must not trigger compilation.
@triton.jit(do_not_specialize=["most_kept", "num_kept_places"])
def _advance(  # type: ignore[no-untyped-def]
    mixed, queries, keys, decays, steps, state, out, decay_rate, skip,
    row_starts, num_chain_rows, parents, slots_in, num_kept, slots_out, most_kept, num_kept_places,
    RULE: tl.constexpr, WIDTH: tl.constexpr, VALUE_AT: tl.constexpr, KEY_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, DECAYS: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (heads x blocks of columns, sessions)."""
    head = tl.program_id(0) // tl.cdiv(VALUE_DIM, BLOCK)
    column = tl.program_id(0) % tl.cdiv(VALUE_DIM, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    element = tl.arange(0, PADDED_KEY_DIM)
    is_key, is_column = element < KEY_DIM, column < VALUE_DIM
    is_state = is_key[:, None] & is_column[None, :]
    session = tl.program_id(1)
    slot_out = tl.load(slots_out + session)
    if slot_out < 0:  # padding
        return
    slot_in = tl.load(slots_in + session)
    first = tl.load(row_starts + session)
    num_rows = tl.load(row_starts + session + 1) - first
    last_chain_row = tl.load(num_chain_rows + session) - 1
    count = tl.load(num_kept + session, mask=slot_in >= 0, other=0)
    parents += first
    tile = (head * KEY_DIM + element)[:, None] * VALUE_DIM + column[None, :]
    slot_stride = NUM_HEADS * KEY_DIM * VALUE_DIM
    now = tl.load(state + slot_in.to(tl.int64) * slot_stride + tile, mask=is_state & (slot_in >= 0), other=0.0)
    root = now  # the state after the last chain row, from then on
    if RULE == 2:
        rates = tl.load(decay_rate + element[:, None] * VALUE_DIM + column[None, :], mask=is_state, other=0.0)
        factor = tl.load(skip + column, mask=is_column, other=0.0)
    elif RULE == 1:
        factor = tl.load(skip + head)

    goal = -count  # the next row that was not computed yet; those before the call's are negative
    node = goal  # the row to compute now: it, or one on the path to it
    while goal < num_rows:
        row = tl.where(node < 0, session * most_kept + count + node, num_kept_places + first + node).to(tl.int64)
        if (node == last_chain_row) & (goal == node):
            tl.store(state + slot_out.to(tl.int64) * slot_stride + tile, now, mask=is_state)
        key_row = row * KEY_STRIDE + head // GROUP * KEY_DIM + element
        key = tl.load(keys + key_row, mask=is_key, other=0.0).to(tl.float32)
        query = tl.load(queries + key_row, mask=is_key, other=0.0).to(tl.float32)
        value = tl.load(mixed + row * WIDTH + VALUE_AT + head * VALUE_DIM + column, mask=is_column, other=0.0)
        value = value.to(tl.float32)
        if RULE == 2:
            step = tl.load(steps + row * VALUE_DIM + column, mask=is_column, other=0.0)
            decayed = now * tl.exp(rates * step[None, :])
            added = step * value
        else:
            if DECAYS == 1:
                decayed = now * tl.load(decays + row * NUM_HEADS + head)
            else:
                decay = tl.load(decays + (row * NUM_HEADS + head) * KEY_DIM + element, mask=is_key, other=0.0)
                decayed = now * decay[:, None]
            step = tl.load(steps + row * NUM_HEADS + head)
            if RULE == 0:
                value -= tl.sum(decayed * key[:, None], 0)
            added = value * step
        now = decayed + key[:, None] * added[None, :]
        result = tl.sum(now * query[:, None], 0)
        if RULE != 0:
            result += factor * value
        is_asked = (goal == node) & (node >= 0)
        out_row = out + ((first + node).to(tl.int64) * NUM_HEADS + head) * VALUE_DIM
        tl.store(out_row + column, round_to(result, out.dtype.element_ty), mask=is_column & is_asked)
        root = tl.where(node == last_chain_row, now, root)

        done = node
        if goal == node:
            goal += 1
        # The first row on the path to the goal whose parent's state is at hand.
        node = goal
        parent = parent_of(parents, node, num_rows)
        while parent > done:
            node = parent
            parent = parent_of(parents, node, num_rows)
        is_branch = parent < done
        while is_branch & (parent > last_chain_row):
            node = parent
            parent = parent_of(parents, node, num_rows)
        now = tl.where(is_branch, root, now)


def advance(mixed: torch.Tensor, layer: OuterLayer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """Advance the sessions' states by the mixed rows of `short_conv.triton.mixed_rows`, which has checked the layer.

    The result has the dtype of mixed. Raises KernelArgumentError; the contents of the rows' tables
    are not checked.
    """
    _, num_heads, key_dim, value_dim = states.state.shape
    if not states.state.is_contiguous() or states.state.dtype != torch.float32:
        raise KernelArgumentError(f"states are {states.state.dtype}: they must be float32 and contiguous")
    num_sessions, most_kept = rows.kept_rows.shape
    num_kept_places = num_sessions * most_kept
    out = mixed.new_empty((mixed.shape[0] - num_kept_places, num_heads * value_dim))
    if out.shape[0] == 0:
        return out
    ready = prepare(mixed, layer, num_heads, key_dim)
    queries, keys, key_stride = _keys(mixed, layer.columns, ready)
    padded_key_dim = triton.next_power_of_2(key_dim)
    block = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, min(_TILE // padded_key_dim, triton.next_power_of_2(value_dim))))
    _advance[(num_heads * triton.cdiv(value_dim, block), num_sessions)](
        mixed, queries, keys, mixed if ready.decays is None else ready.decays, ready.steps, states.state, out,
        layer.decay_rate, layer.decay_rate if layer.skip is None else layer.skip,
        rows.row_starts, rows.num_chain_rows, rows.parents, rows.slots_in, rows.num_kept, rows.slots_out,
        most_kept, num_kept_places,
        RULE=layer.rule, WIDTH=mixed.shape[1], VALUE_AT=layer.columns.value, KEY_STRIDE=key_stride,
        NUM_HEADS=num_heads, GROUP=num_heads // layer.num_key_heads,
        DECAYS=1 if layer.rule == ELEMENTWISE else layer.dt_bias.shape[0] // num_heads,
        KEY_DIM=key_dim, PADDED_KEY_DIM=padded_key_dim, VALUE_DIM=value_dim, BLOCK=block,
        num_warps=max(1, min(8, padded_key_dim * block // 1024)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _keys(mixed: torch.Tensor, columns: Columns, ready: ReadyRows) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Queries and keys of all rows, and their stride in elements. The two rules of Mamba take them as they are."""
    if ready.queries is not None and ready.keys is not None:
        return ready.queries, ready.keys, ready.keys.stride(0)
    return mixed[:, columns.query :], mixed[:, columns.key :], mixed.shape[1]
