"""The sessions' states in one forward, as a recurrent kernel takes them.

Not here: the rows' tokens (run/batch), which slots a session has (table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.kernels.recurrent.rows import RecurrentRows


@dataclass(frozen=True)
class StateRows:
    """One session's state in a forward (see kernels/recurrent/rows).

    num_committed: leading rows of the session that are committed tokens, at least 1; the rest is a draft.
    """

    slot_in: int | None  # None: a fresh session
    kept_rows: Sequence[int]
    slot_out: int
    num_committed: int


def measured_state(place: int) -> StateRows:
    """Returns a session's state for a measured forward: it replays a row and writes a slot, whatever they hold."""
    return StateRows(2 * place, (0,), 2 * place + 1, num_committed=1)


def recurrent_rows(
    states: Sequence[StateRows],
    num_rows: Sequence[int],
    tree_parents: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> RecurrentRows:
    """Returns the sessions' rows in the order of the batch, num_rows each.

    The last rows of a session are a tree with these parents, relative rows as in SessionRows, if there are any.
    """
    num_kept = [len(state.kept_rows) for state in states]
    kept_rows = np.zeros((len(states), max(num_kept, default=0)), dtype=np.int32)
    parents: list[int] = []
    for index, (state, count, of_tree) in enumerate(zip(states, num_rows, tree_parents, strict=True)):
        kept_rows[index, : num_kept[index]] = state.kept_rows
        parents += [*range(-1, count - len(of_tree) - 1), *of_tree]

    def tensor(values: object) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int32)).to(device)

    return RecurrentRows(
        row_starts=tensor([0, *np.cumsum(num_rows)]),
        num_chain_rows=tensor([state.num_committed for state in states]),
        parents=tensor(parents),
        slots_in=tensor([-1 if state.slot_in is None else state.slot_in for state in states]),
        kept_rows=tensor(kept_rows),
        num_kept=tensor(num_kept),
        slots_out=tensor([state.slot_out for state in states]),
        sessions=tensor(np.repeat(np.arange(len(states)), num_rows)),
    )
