"""Assigns slots to sessions' states and to the states kept for the prefix cache: numbers only, no torch.

A state is a slot's, at position `base`, and the kept rows of the slot's log after it. A slot is immutable once written:
a forward reads one and writes another, so after a rejected draft, a lost reply or a failed forward nothing has to be
restored, and sessions and snapshots share a slot by reference count. A session holds two slots during a forward, else
one. A snapshot is the state at the end of a cached block; when slots are needed, the least recently used ones are
dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.errors import IntegrityError


class OutOfSlots(Exception):
    """No free slot; the caller preempts a session or waits."""


@dataclass
class SessionState:
    """One session's slots. Without `slot` it is fresh: position 0, a state of zeros."""

    slot: int | None = None
    base: int = 0
    kept_rows: list[int] = field(default_factory=list)  # ascending rows of the slot's log, one per position from base
    slot_out: int | None = None  # written by the forward in progress

    @property
    def position(self) -> int:
        """Returns the number of tokens that the state has read."""
        return self.base + len(self.kept_rows)


@dataclass(frozen=True)
class _Snapshot:
    slot: int
    base: int
    kept_rows: tuple[int, ...]


class StateTable:
    """Assigns slots. Every method leaves `check_integrity` true."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._ref_counts = [0] * num_slots
        self._sessions: dict[int, SessionState] = {}
        # Maps the hash of a cached block -> the snapshot of the state at its end; oldest first.
        self._snapshots: OrderedDict[bytes, _Snapshot] = OrderedDict()

    @property
    def num_free_slots(self) -> int:
        """Counts the slots that sessions can have: free, or held by snapshots alone. May be called from any thread."""
        return self.num_slots - len(set(self._held_by_sessions()))

    def has_snapshot(self, block_hash: bytes) -> bool:
        return block_hash in self._snapshots

    def open(self, block_hash: bytes | None = None) -> SessionState:
        """Opens a session at the end of a block that has a snapshot; None: at position 0."""
        state = SessionState()
        if block_hash is not None:
            self._snapshots.move_to_end(block_hash)
            snapshot = self._snapshots[block_hash]
            self._ref_counts[snapshot.slot] += 1
            state = SessionState(snapshot.slot, snapshot.base, list(snapshot.kept_rows))
        self._sessions[id(state)] = state
        return state

    def reserve(self, state: SessionState) -> int:
        """Returns the slot that the session's next forward writes. Raises OutOfSlots, leaving the state unchanged."""
        if state.slot_out is None:
            while not self._free and self._snapshots:
                _, oldest = self._snapshots.popitem(last=False)
                self._release(oldest.slot)
            if not self._free:
                raise OutOfSlots(f"all {self.num_slots} slots hold states")
            state.slot_out = self._free.pop()
            self._ref_counts[state.slot_out] = 1
        return state.slot_out

    def withdraw(self, state: SessionState) -> None:
        """Releases slot_out: what a forward wrote there is not wanted."""
        if state.slot_out is not None:
            self._release(state.slot_out)
            state.slot_out = None

    def fork(self, state: SessionState) -> SessionState:
        """Opens another session at the same state."""
        twin = SessionState(state.slot, state.base, list(state.kept_rows))
        if twin.slot is not None:
            self._ref_counts[twin.slot] += 1
        self._sessions[id(twin)] = twin
        return twin

    def settle(self, state: SessionState, base: int, kept_rows: Sequence[int]) -> None:
        """Records that a forward has written slot_out: the state at `base`, and the log rows that became tokens."""
        if state.slot_out is None:
            raise IntegrityError("a state is settled that no forward has written")
        written, state.slot_out = state.slot_out, None
        self._forget(state)
        state.slot, state.base, state.kept_rows = written, base, list(kept_rows)

    def rewind(self, state: SessionState, position: int) -> int:
        """Drops everything after `position`; returns the position of the state that is left.

        That is 0 if the slot's state already includes later tokens, which cannot be undone.
        """
        if position < state.base:
            self._forget(state)
        del state.kept_rows[max(0, position - state.base) :]
        return state.position

    def keep(self, state: SessionState, block_hash: bytes, position: int) -> None:
        """Makes the state at `position`, the end of this cached block, a snapshot.

        Does nothing if there is one already, or if the session no longer has a state at that position.
        """
        if state.slot is None or not state.base <= position <= state.position or block_hash in self._snapshots:
            return
        self._ref_counts[state.slot] += 1
        kept_rows = tuple(state.kept_rows[: position - state.base])
        self._snapshots[block_hash] = _Snapshot(state.slot, state.base, kept_rows)

    def close(self, state: SessionState) -> None:
        """Releases both slots."""
        self._forget(state)
        self.withdraw(state)
        self._sessions.pop(id(state), None)

    def forget(self) -> None:
        """Drops all snapshots."""
        for snapshot in self._snapshots.values():
            self._release(snapshot.slot)
        self._snapshots.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every slot is free or counts its sessions and snapshots."""
        counts = [0] * self.num_slots
        for slot in [*self._held_by_sessions(), *(kept.slot for kept in self._snapshots.values())]:
            counts[slot] += 1
        if counts != self._ref_counts:
            raise IntegrityError(f"reference counts {self._ref_counts} but {counts} are held")
        if sorted(self._free) != [slot for slot in range(self.num_slots) if counts[slot] == 0]:
            raise IntegrityError(f"of slots with reference counts {counts} these are free: {sorted(self._free)}")

    def _held_by_sessions(self) -> list[int]:
        sessions = list(self._sessions.values())  # at once: num_free_slots is read from other threads
        pairs = ((state.slot, state.slot_out) for state in sessions)
        return [slot for pair in pairs for slot in pair if slot is not None]

    def _forget(self, state: SessionState) -> None:
        if state.slot is not None:
            self._release(state.slot)
        state.slot, state.base, state.kept_rows = None, 0, []

    def _release(self, slot: int) -> None:
        self._ref_counts[slot] -= 1
        if self._ref_counts[slot] == 0:
            self._free.append(slot)
