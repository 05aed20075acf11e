"""The rows of a recurrent kernel's call, the states that they start from, and the slots for new states.

A *slot* holds one immutable state per layer: the state at some position (`window`, `state`) and a *log* of the raw rows
after it. Which rows of a log became committed tokens is known only when the draft was verified, so the next call says
it (`kept_rows`) and replays them. A call reads the slots of `slots_in` and writes those of `slots_out`, never the same
ones: it may be repeated, and a failed call leaves its session's state whole. States are never rolled back.

One session in a call, every row by the same function of (window, state, raw row):

1. The kept rows of slot_in's log, in order: they advance window and state and give no output.
2. The chain rows but the last: they advance window and state, and give outputs. Then window and state go to slot_out.
3. The last chain row and the rows after it (the draft's): they give outputs, each from its parent's window and state,
   and their raw rows go to slot_out's log in order. Their states are not stored.

Not here: who owns a slot (engine/recurrent).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class RecurrentRows:
    """T rows of N sessions; all tensors are int32. Every session has at least one chain row."""

    row_starts: torch.Tensor  # [N + 1]; half-open row ranges of the sessions
    num_chain_rows: torch.Tensor  # [N]; leading rows of the session that are committed tokens; at least 1
    parents: torch.Tensor  # [T]; relative row of the row's parent: an earlier row; -1 for a session's first row
    slots_in: torch.Tensor  # [N]; -1: a fresh session: window and state are zeros, and no slot is read
    kept_rows: torch.Tensor  # [N, num_log_rows]; ascending indices into slot_in's log; [n, num_kept[n]:] is not read
    num_kept: torch.Tensor  # [N]
    slots_out: torch.Tensor  # [N]; distinct, and none of slots_in
    sessions: torch.Tensor  # [T]; the session of each row

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors in the order of the fields."""
        return [getattr(self, each.name) for each in dataclasses.fields(self)]

    @cached_property
    def kept_starts(self) -> torch.Tensor:
        """int32 [N + 1]: half-open ranges of the sessions in a list of all kept rows."""
        return torch.nn.functional.pad(self.num_kept.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def num_kept_rows(self) -> int:
        """Kept rows of all sessions."""
        return int(self.kept_starts[-1])


@dataclass(frozen=True)
class LayerStates:
    """The slots of one recurrent layer: C channels of a short convolution over K rows, raw rows W wide."""

    window: torch.Tensor  # model dtype [num_slots, K - 1, C]; the last K - 1 raw rows' first C columns, oldest first
    state: torch.Tensor  # float32 [num_slots, ...], whatever the model's dtype; its shape is the recurrence's
    log: torch.Tensor  # model dtype [num_slots, num_log_rows, W]; raw rows as they come out of the input projection
