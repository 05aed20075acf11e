"""Slots of states against a plain model that writes a session's whole prefix into the slot, as a forward would.

A session must find exactly its own prefix at its position: that fails if a slot is freed, shared or handed out wrongly.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.errors import IntegrityError
from outrider.engine.recurrent.table import OutOfSlots, SessionState, StateTable

NUM_SLOTS = 5


class Session:
    """tokens: what its state has read."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self.tokens: list[int] = []


class StateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = StateTable(NUM_SLOTS)
        self.sessions: list[Session] = []
        self.snapshots: dict[bytes, list[int]] = {}  # ever made
        # slot -> the prefix that its state has read, and the rows of its log
        self.content: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def pick(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.sessions))

    @rule()
    def open(self) -> None:
        self.sessions.append(Session(self.table.open()))
        assert self.sessions[-1].state.position == 0

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), back=st.integers(0, 4))
    def keep(self, data: st.DataObject, back: int) -> None:
        """A snapshot at the end of the session's tokens, or a little before; its hash stands for these tokens."""
        session = self.pick(data)
        tokens = session.tokens[: max(0, len(session.tokens) - back)]
        self.table.keep(session.state, bytes(tokens), len(tokens))
        if len(tokens) >= session.state.base and session.state.slot is not None:
            assert self.table.has_snapshot(bytes(tokens))
            self.snapshots[bytes(tokens)] = tokens

    @rule(data=st.data())
    def open_at_a_snapshot(self, data: st.DataObject) -> None:
        hashes = [block_hash for block_hash in self.snapshots if self.table.has_snapshot(block_hash)]
        if hashes:
            block_hash = data.draw(st.sampled_from(hashes))
            self.sessions.append(Session(self.table.open(block_hash)))
            self.sessions[-1].tokens = list(self.snapshots[block_hash])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), chain=st.lists(st.integers(0, 9), min_size=1, max_size=4), fails=st.booleans())
    def forward(self, data: st.DataObject, chain: list[int], fails: bool) -> None:
        """Tokens, then a draft of which any rows are kept; or a forward that fails after it wrote."""
        session = self.pick(data)
        num_free = self.table.num_free_slots
        try:
            slot_out = self.table.reserve(session.state)
        except OutOfSlots:
            assert num_free == 0
            return
        assert slot_out == self.table.reserve(session.state), "a plan that is made again reserves nothing more"
        assert all(slot_out != other.state.slot for other in self.sessions)
        draft = data.draw(st.lists(st.integers(10, 19), max_size=3))
        read = (*self.found(session), *chain)
        self.content[slot_out] = (read[:-1], (chain[-1], *draft))
        if fails:
            return
        kept = [row for row in range(len(draft)) if data.draw(st.booleans())]
        self.table.settle(session.state, len(read) - 1, [0, *(1 + row for row in kept)])
        session.tokens = [*read, *(draft[row] for row in kept)]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        session = self.pick(data)
        reserved = session.state.slot_out is not None
        num_free = self.table.num_free_slots
        self.table.withdraw(session.state)
        assert self.table.num_free_slots == num_free + reserved

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session, num_free = self.pick(data), self.table.num_free_slots
        twin = Session(self.table.fork(session.state))
        twin.tokens = list(session.tokens)
        self.sessions.append(twin)
        assert self.table.num_free_slots == num_free, "a slot is shared, not copied"

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), back=st.integers(0, 6))
    def rewind(self, data: st.DataObject, back: int) -> None:
        session = self.pick(data)
        wanted = max(0, len(session.tokens) - back)
        base = session.state.base
        position = self.table.rewind(session.state, wanted)
        assert position == (wanted if wanted >= base else 0)
        session.tokens = session.tokens[:position]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.sessions.remove(session)
        self.table.close(session.state)

    def found(self, session: Session) -> tuple[int, ...]:
        """What the session's state has read, by the slots."""
        if session.state.slot is None:
            return ()
        prefix, log = self.content[session.state.slot]
        assert len(prefix) == session.state.base
        return (*prefix, *(log[row] for row in session.state.kept_rows))

    @invariant()
    def every_session_finds_its_own_tokens(self) -> None:
        self.table.check_integrity()
        for session in self.sessions:
            assert self.found(session) == tuple(session.tokens)
            assert session.state.position == len(session.tokens)
        held = {slot for session in self.sessions for slot in (session.state.slot, session.state.slot_out)}
        assert self.table.num_free_slots == NUM_SLOTS - len(held - {None})


TestStateTable = StateMachine.TestCase
TestStateTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_the_check_finds() -> None:
    table = StateTable(2)
    state = table.open()
    table.reserve(state)
    table.settle(state, 3, [0])
    state.slot_out = state.slot
    with pytest.raises(IntegrityError):
        table.check_integrity()


def test_slots_for_sessions_cost_the_oldest_snapshots() -> None:
    table = StateTable(3)
    for block_hash in (b"a", b"b"):
        state = table.open()
        table.reserve(state)
        table.settle(state, 3, [0])
        table.keep(state, block_hash, 4)
        table.close(state)
    assert table.num_free_slots == 3
    used = table.open(b"a")
    first, second = table.open(), table.open()
    table.reserve(first)
    table.reserve(second)
    assert (table.has_snapshot(b"a"), table.has_snapshot(b"b")) == (True, False)
    with pytest.raises(OutOfSlots):
        table.reserve(used)
    assert not table.has_snapshot(b"a")
    table.close(second)
    table.reserve(used)
    table.check_integrity()


def test_a_state_that_no_forward_wrote_is_not_settled() -> None:
    table = StateTable(2)
    with pytest.raises(IntegrityError):
        table.settle(table.open(), 3, [0])
