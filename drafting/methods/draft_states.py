"""The recurrent states of a draft model's sessions, for a model with recurrent layers.

A proposal's first forward reads the committed tokens and writes a slot: the state before the last of them, whose raw
row is the first of the slot's log. Each further forward of a chain starts from that slot, replays the log, and writes a
scratch slot of which only the raw row of its token is used: it is appended to the session's log. So accepted draft
tokens are rows of the log, as in the verifier, and a cut only shortens a list. A tree's forwards leave nothing.

The state before the proposal is kept as well while there is room: a drafter that drafts ahead of the verifier has read
a guess as committed, and goes back to the state before it.

Not here: which slot belongs to whom (engine.recurrent.table), keys and values (draft_caches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.errors import IntegrityError
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.recurrent.states import RecurrentStates
from outrider.engine.recurrent.table import OutOfSlots, SessionState, StateTable


@dataclass
class DraftState:
    """One session's state. earlier: before its last proposal; None: there was none, or its slot was needed."""

    now: SessionState
    earlier: SessionState | None = None

    @property
    def oldest_position(self) -> int:
        """Returns the first position that a cut can go back to without recomputing."""
        return self.now.base if self.earlier is None else self.earlier.base


class DraftStates:
    """The states of all sessions."""

    def __init__(self, states: RecurrentStates) -> None:
        self.table = StateTable(states.num_slots)
        self._states = states
        self._open: dict[int, DraftState] = {}

    @property
    def num_log_rows(self) -> int:
        return self._states.num_log_rows

    def open(self, block_hashes: Sequence[bytes]) -> DraftState:
        """Opens a session at the end of the last of these cached blocks."""
        state = DraftState(self.table.open(block_hashes[-1] if block_hashes else None))
        self._open[id(state)] = state
        return state

    def close(self, state: DraftState) -> None:
        self.table.close(state.now)
        self._drop_earlier(state)
        self._open.pop(id(state), None)

    def reserve(self, state: DraftState) -> None:
        """Reserves a slot for the session's next forward.

        Raises OutOfSlots if even states of earlier proposals do not free one.
        """
        while True:
            try:
                self.table.reserve(state.now)
                return
            except OutOfSlots:
                holder = next((other for other in self._open.values() if other.earlier is not None), None)
                if holder is None:
                    raise
                self._drop_earlier(holder)

    def rows(self, state: DraftState, start: int, num_committed: int) -> StateRows:
        """Returns the state rows of a forward from position `start` on, which the state must have reached."""
        now = state.now
        if now.slot_out is None or not now.base <= start <= now.position:
            raise IntegrityError(f"a draft's state from {now.base} to {now.position} for a forward from {start} on")
        return StateRows(now.slot, now.kept_rows[: start - now.base], now.slot_out, num_committed)

    def settle(self, state: DraftState, num_committed: int, *, keeps_earlier: bool = True) -> None:
        """Records that a forward has read the committed tokens up to this number."""
        self._drop_earlier(state)
        if keeps_earlier and state.now.slot is not None:
            state.earlier = self.table.fork(state.now)
        self.table.settle(state.now, num_committed - 1, [0])

    def append(self, states: Sequence[DraftState]) -> None:
        """Records that each one's forward has read the next token of a chain."""
        sources, targets = [], []
        for state in states:
            now = state.now
            if now.slot is None or now.slot_out is None:
                raise IntegrityError("a chain goes on without a state")
            sources.append((now.slot_out, 0))
            targets.append((now.slot, len(now.kept_rows)))
        self._states.copy_log_rows(sources, targets)
        for state in states:
            state.now.kept_rows.append(len(state.now.kept_rows))
            self.table.withdraw(state.now)

    def forget_forward(self, state: DraftState) -> None:
        """Discards the session's forward, which has computed a tree, or failed."""
        self.table.withdraw(state.now)

    def rewind(self, state: DraftState, position: int) -> int:
        """Drops everything after `position`, or more where no state is left there; returns the position reached."""
        if position < state.now.base and state.earlier is not None:
            self.table.close(state.now)
            state.now, state.earlier = state.earlier, None
        return self.table.rewind(state.now, position)

    def evict(self, state: DraftState) -> None:
        """Drops the session's states; it begins again at position 0."""
        self._drop_earlier(state)
        self.table.close(state.now)
        state.now = self.table.open()

    def keep(self, state: DraftState, block_hash: bytes, position: int) -> None:
        """Shares the state at `position` with other sessions whose tokens begin with that block and those before it."""
        self.table.keep(state.now, block_hash, position)

    def _drop_earlier(self, state: DraftState) -> None:
        if state.earlier is not None:
            self.table.close(state.earlier)
            state.earlier = None
