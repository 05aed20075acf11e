"""The shared parts of the recurrences in plain torch: the walk over a call's rows, and functions of one row.

A row is computed alone and in fixed shapes, from functions that torch computes alike wherever an element lies: so its
bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import torch

from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows

WindowAndState: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # [K - 1, C], [...]
# (raw row [W], window, state) -> window and state after the row, and its output
Step: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def walk(raw: torch.Tensor, states: LayerStates, rows: RecurrentRows, step: Step) -> torch.Tensor:
    """The outputs [T, ...] of the raw rows [T, W], each by `step`; reads and writes the slots as `rows` says."""
    outputs: list[torch.Tensor] = []
    for session, (first, last) in enumerate(pairwise(rows.row_starts.tolist())):
        now = _state_before(session, states, rows, step)
        slot_out = int(rows.slots_out[session])
        last_chain_row = int(rows.num_chain_rows[session]) - 1
        after: list[WindowAndState] = []  # of the session's rows
        for row, parent in enumerate(rows.parents[first:last].tolist()):
            before = now if parent < 0 else after[parent]
            if row == last_chain_row:
                states.window[slot_out], states.state[slot_out] = before
            window, state, output = step(raw[first + row], *before)
            after.append((window, state))
            outputs.append(output)
        states.log[slot_out, : last - first - last_chain_row] = raw[first + last_chain_row : last]
    return torch.stack(outputs)


def _state_before(session: int, states: LayerStates, rows: RecurrentRows, step: Step) -> WindowAndState:
    """slot_in's state after its kept rows."""
    slot_in = int(rows.slots_in[session])
    if slot_in < 0:
        return torch.zeros_like(states.window[0]), torch.zeros_like(states.state[0])
    window, state = states.window[slot_in], states.state[slot_in]
    for kept in rows.kept_rows[session, : int(rows.num_kept[session])].tolist():
        window, state, _ = step(states.log[slot_in, kept], window, state)
    return window, state


def convolve(
    channels: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of a depthwise convolution: channels [C], window [K - 1, C], weight [C, K], bias [C].

    Returns the window after the row and the row's sums [C] in fp32, the bias first, then the oldest row.
    """
    taps = torch.cat([window, channels[None]])
    mixed = torch.zeros_like(channels, dtype=torch.float32) if bias is None else bias.float()
    for tap, tap_weight in zip(taps.float(), weight.float().unbind(1), strict=True):
        mixed = mixed + tap * tap_weight
    return taps[1:], mixed


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes the sigmoid without torch.sigmoid, whose bits depend on where an element lies."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Computes softplus without torch's own, whose bits depend on where an element lies."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
