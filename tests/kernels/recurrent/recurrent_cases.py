"""Calls of a recurrent kernel for tests: the same rows cut into calls in every way that the verifier knows.

`Driver` keeps one session's slots as the engine does. Slots that hold nothing are NaN: a kernel that reads one shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.engine.recurrent.rows import StateRows, recurrent_rows
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows

NUM_LOG_ROWS = 12
_NUM_SLOTS = 8

# rows [T, W], states, rows -> outputs [T, ...]
Kernel = Callable[[torch.Tensor, LayerStates, RecurrentRows], torch.Tensor]


def nan_states(
    num_taps: int, num_channels: int, state_shape: Sequence[int], log_width: int, dtype: torch.dtype
) -> LayerStates:
    def nan(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=of)

    return LayerStates(
        window=nan(_NUM_SLOTS, num_taps - 1, num_channels),
        state=nan(_NUM_SLOTS, *state_shape, of=torch.float32),
        log=nan(_NUM_SLOTS, NUM_LOG_ROWS, log_width),
    )


@dataclass
class Part:
    """Rows of one session in a call. draft: rows after the committed ones, and which of them are accepted, in order."""

    committed: torch.Tensor  # [n, W]
    draft: torch.Tensor  # [d, W]
    parents: Sequence[int] = ()  # of the draft's rows, -1: the last committed row; empty: a chain
    accepted: Sequence[int] = ()


@dataclass
class Driver:
    kernel: Kernel
    states: LayerStates
    slots: list[int] = field(default_factory=lambda: list(range(_NUM_SLOTS)))
    state: StateRows = field(default_factory=lambda: StateRows(None, (), -1, 1))

    def call(self, part: Part, others: Sequence[torch.Tensor] = (), place: int = 0) -> torch.Tensor:
        """One call with `part` at a place among whole fresh sessions; returns part's outputs. Frees and poisons what is
        not needed any more."""
        free = [slot for slot in self.slots if slot != self.state.slot_in]
        mine = replace(self.state, slot_out=free.pop(0), num_committed=len(part.committed))
        sessions = [StateRows(None, (), free.pop(0), len(other)) for other in others]
        rows = [*others[:place], torch.cat([part.committed, part.draft]), *others[place:]]
        sessions.insert(place, mine)
        parents = [()] * len(rows)
        if part.parents:
            parents[place] = [len(part.committed) + parent for parent in part.parents]
        before = _slot(self.states, mine.slot_in)
        out = self.kernel(torch.cat(rows), self.states, recurrent_rows(sessions, [len(each) for each in rows], parents))
        assert all(torch.equal(*pair) for pair in zip(before, _slot(self.states, mine.slot_in), strict=True)), (
            "a slot that is read is not written"
        )
        for slot in self.slots:
            if slot != mine.slot_out:
                for tensor in (self.states.window, self.states.state, self.states.log):
                    tensor[slot] = math.nan
        self.state = StateRows(mine.slot_out, [0, *(1 + row for row in part.accepted)], -1, 1)
        start = sum(len(each) for each in rows[:place])
        return out[start : start + len(rows[place])]


def _slot(states: LayerStates, slot: int | None) -> list[torch.Tensor]:
    return [] if slot is None else [part[slot].nan_to_num(7.0) for part in (states.window, states.state, states.log)]


def committed(rows: torch.Tensor) -> Part:
    return Part(rows, rows[:0])


def ways(rows: torch.Tensor, noise: torch.Tensor) -> dict[str, list[Part]]:
    """Histories after which all of `rows` [T, W] were read, whose outputs are compared. noise: as many other rows and a
    few more, for drafts that are rejected."""
    cuts = {f"cut at {cut}": [committed(rows[:cut]), committed(rows[cut:])] for cut in range(1, len(rows), 3)}
    behind_a_chunk = Part(rows[:7], torch.cat([rows[7:9], noise[:1]]), accepted=(0, 1))
    return {
        **cuts,
        "three chunks": [committed(rows[:16]), committed(rows[16:32]), committed(rows[32:])],
        "single rows": [committed(row[None]) for row in rows],
        "drafted chains": drafted_chains(rows, noise),
        "drafted trees": drafted_trees(rows, noise),
        "drafts behind a chunk": [behind_a_chunk, committed(rows[9:])],
    }


def drafted_chains(rows: torch.Tensor, noise: torch.Tensor, start: int = 9) -> list[Part]:
    """None, a part and all of a draft accepted; rounds without drafts after each of these."""
    parts = [committed(rows[:start])]
    rounds = itertools.cycle([(0, 0), (4, 0), (0, 0), (2, 2), (0, 0), (3, 1), (0, 0), (1, 0), (4, 3), (2, 2)])
    while start < len(rows):
        count, right = next(rounds)
        right = min(right, len(rows) - start - 1)
        draft = torch.cat([rows[start + 1 : start + 1 + right], noise[start : start + count - right]])
        parts.append(Part(rows[start : start + 1], draft, accepted=range(right)))
        start += 1 + right
    return parts


def drafted_trees(rows: torch.Tensor, noise: torch.Tensor, start: int = 9) -> list[Part]:
    """Paths three rows deep: a wrong sibling before each right node, and a child of the first of them at the end."""
    parts = [committed(rows[:start])]
    while start < len(rows):
        depth = min(3, len(rows) - start - 1)
        right, wrong = rows[start + 1 : start + 1 + depth], noise[start : start + depth + 1]
        nodes = torch.cat([torch.stack([wrong[:depth], right], 1).flatten(0, 1), wrong[depth:]])
        parents = [*(2 * level - 1 for level in range(depth) for _ in range(2)), 0 if depth else -1]
        accepted = [2 * level + 1 for level in range(depth)]
        parts.append(Part(rows[start : start + 1], nodes, parents, accepted))
        start += 1 + depth
    return parts


def outputs(driver: Driver, parts: Sequence[Part], others: Sequence[torch.Tensor] = (), place: int = 0) -> torch.Tensor:
    """Of the rows that were read: committed, and accepted."""
    found = []
    for part in parts:
        out = driver.call(part, others, place)
        found += [out[: len(part.committed)], *(out[len(part.committed) + row][None] for row in part.accepted)]
    return torch.cat(found)
