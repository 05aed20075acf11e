"""Block bookkeeping against a plain model that remembers what stands in every block.

The model writes a position's whole prefix into the block that holds it, as a forward would write K and V. A session
must then find its own prefix at every position that the manager says is valid: that fails whenever a block is shared,
evicted or handed out wrongly.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.attention.block_manager import BlockManager, BlockTable, OutOfBlocks

BLOCK_SIZE = 3
NUM_BLOCKS = 9


class Session:
    """`num_computed` positions of `token_ids` were written; `num_committed` of the tokens are no drafts."""

    def __init__(self, table: BlockTable, salt: str, token_ids: list[int], num_computed: int) -> None:
        self.table = table
        self.salt = salt
        self.token_ids = token_ids
        self.num_computed = num_computed
        self.num_committed = len(token_ids)


Written = tuple[str, tuple[int, ...]]


class BlockMachine(RuleBasedStateMachine):
    @initialize(prefix_caching=st.booleans())
    def start(self, prefix_caching: bool) -> None:
        self.prefix_caching = prefix_caching
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.content: dict[tuple[int, int], Written] = {}
        self.sessions: list[Session] = []
        # Every (salt, full prefix) that was ever registered: a hit must be one of them.
        self.registered: set[Written] = set()

    def pick(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.sessions))

    @rule(length=st.integers(1, 14), token=st.integers(0, 1), salt=st.sampled_from(["", "a"]), data=st.data())
    def open(self, length: int, token: int, salt: str, data: st.DataObject) -> None:
        token_ids = [token] * length
        if self.sessions and data.draw(st.booleans()):  # one more on the same prompt
            other = self.pick(data)
            token_ids, salt = [*other.token_ids, token], other.salt
        elif data.draw(st.booleans()):
            token_ids[data.draw(st.integers(0, length - 1))] = 1 - token
        table, num_cached = self.manager.open(token_ids, salt)
        assert num_cached % BLOCK_SIZE == 0
        assert num_cached < len(token_ids), "the last token is always left to compute"
        assert len(table.block_ids) * BLOCK_SIZE == num_cached
        if num_cached:
            assert self.prefix_caching
            assert (salt, tuple(token_ids[:num_cached])) in self.registered
        self.sessions.append(Session(table, salt, token_ids, num_cached))
        if data.draw(st.integers(0, 3)):
            self.commit(self.sessions[-1], [], 0)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), num_draft=st.integers(0, 5))
    def compute(self, data: st.DataObject, num_draft: int) -> None:
        """Rows up to the end of the tokens and of a draft, then a commit of part of the draft."""
        session = self.pick(data)
        draft = data.draw(st.lists(st.integers(0, 1), min_size=num_draft, max_size=num_draft))
        self.commit(
            session, draft, data.draw(st.integers(0, num_draft)), is_registered=bool(data.draw(st.integers(0, 3)))
        )

    def commit(self, session: Session, draft: list[int], num_accepted: int, *, is_registered: bool = True) -> None:
        tokens = session.token_ids + draft
        before = list(session.table.block_ids)
        could = self.manager.can_grow(session.table, len(tokens))
        try:
            self.manager.grow(session.table, len(tokens))
        except OutOfBlocks:
            assert not could
            assert session.table.block_ids == before, "a growth that fails changes nothing"
            return
        assert could
        assert session.table.block_ids[: len(before)] == before
        for position in range(session.num_computed, len(tokens)):
            self.write(session, position, tokens)
        session.token_ids = tokens[: session.num_committed + num_accepted]
        session.num_committed = session.num_computed = len(session.token_ids)
        assert self.manager.truncate(session.table, session.num_computed) == session.num_computed
        if is_registered:
            self.register(session)

    def write(self, session: Session, position: int, tokens: list[int]) -> None:
        block_id = session.table.block_ids[position // BLOCK_SIZE]
        for other in self.sessions:
            assert other is session or block_id not in other.table.block_ids, "a shared block is written to"
        self.content[block_id, position % BLOCK_SIZE] = (session.salt, tuple(tokens[: position + 1]))

    def register(self, session: Session) -> None:
        self.manager.register(session.table, session.token_ids, session.num_computed)
        for end in range(BLOCK_SIZE, session.num_computed + 1, BLOCK_SIZE):
            self.registered.add((session.salt, tuple(session.token_ids[:end])))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), other_token=st.integers(0, 1))
    def cut_back(self, data: st.DataObject, other_token: int) -> None:
        """Part of the output is taken back and something else follows: no block may still show the old tokens."""
        session = self.pick(data)
        keep = data.draw(st.integers(0, session.num_computed))
        valid = self.manager.truncate(session.table, keep)
        assert keep - BLOCK_SIZE < valid <= keep
        assert len(session.table.block_ids) == -(-valid // BLOCK_SIZE)
        session.num_computed = valid
        session.token_ids = [*session.token_ids[:keep], other_token]
        session.num_committed = len(session.token_ids)

    @precondition(lambda self: len(self.sessions) > 2)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.manager.close(session.table)
        assert session.table.block_ids == []
        self.sessions.remove(session)
        self.manager.close(session.table)  # once more is harmless

    @invariant()
    def integrity(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        held = {block_id for session in self.sessions for block_id in session.table.block_ids}
        assert self.manager.num_free_blocks == NUM_BLOCKS - len(held)

    @invariant()
    def every_session_reads_what_it_computed(self) -> None:
        if not hasattr(self, "manager"):
            return
        for session in self.sessions:
            for position in range(session.num_computed):
                block_id = session.table.block_ids[position // BLOCK_SIZE]
                expected = (session.salt, tuple(session.token_ids[: position + 1]))
                assert self.content[block_id, position % BLOCK_SIZE] == expected

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for session in self.sessions:
                self.manager.close(session.table)
            self.manager.check_integrity()
            assert self.manager.num_free_blocks == NUM_BLOCKS


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)


def cached_len(manager: BlockManager, token_ids: list[int], salt: str = "") -> int:
    table, num_cached = manager.open(token_ids, salt)
    manager.close(table)
    return num_cached


def filled(manager: BlockManager, token_ids: list[int], num_computed: int, salt: str = "") -> BlockTable:
    table, _ = manager.open(token_ids, salt)
    manager.grow(table, len(token_ids))
    manager.register(table, token_ids, num_computed)
    return table


def test_only_full_committed_blocks_hit_and_only_under_the_same_salt() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    tokens = list(range(10, 20))
    filled(manager, tokens, num_computed=8, salt="a")
    assert cached_len(manager, [*tokens, 1], "a") == 6
    assert cached_len(manager, tokens[:7], "a") == 6
    assert cached_len(manager, tokens[:6], "a") == 3, "the last token's logits are needed"
    assert cached_len(manager, [*tokens[:3], 99, *tokens[4:]], "a") == 3
    assert cached_len(manager, [99, *tokens[1:]], "a") == 0
    assert cached_len(manager, tokens[3:], "a") == 0, "the same block after another prefix is another block"
    for salt in ("", "b", "aa"):
        assert cached_len(manager, tokens, salt) == 0


def test_a_closed_sessions_blocks_stay_until_their_room_is_needed_oldest_first() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    first, second = [1] * 7, [2] * 7
    for tokens in (first, second):
        table, _ = manager.open(tokens)
        manager.grow(table, 6)
        manager.register(table, tokens, 6)
        manager.close(table)
    assert (cached_len(manager, first), cached_len(manager, second)) == (6, 6)
    for tokens in (first, second):  # what was used last goes last
        assert cached_len(manager, tokens) == 6
    table, _ = manager.open([3] * 4)
    manager.grow(table, 4)
    assert cached_len(manager, second) == 6
    assert cached_len(manager, first) < 6
    manager.check_integrity()


def test_a_cut_through_a_shared_block_gives_the_whole_block_back() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    tokens = [1] * 8
    owner = filled(manager, tokens, num_computed=8)
    guest, num_cached = manager.open(tokens)
    assert num_cached == 6
    assert guest.block_ids == owner.block_ids[:2]
    assert manager.truncate(guest, 5) == 3
    assert guest.block_ids == owner.block_ids[:1]
    manager.grow(guest, 6)
    assert guest.block_ids[1] != owner.block_ids[1]
    manager.check_integrity()


def test_a_cut_through_a_block_that_only_the_cache_knows_gives_it_back_too() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    tokens = [1] * 8
    table = filled(manager, tokens, num_computed=8)
    assert manager.truncate(table, 5) == 3
    manager.grow(table, 6)
    manager.check_integrity()
    assert cached_len(manager, tokens) == 6, "the block still holds what it was registered for"


def test_a_cut_through_a_private_block_keeps_it() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    table = filled(manager, [1] * 8, num_computed=8)
    blocks = list(table.block_ids)
    assert manager.truncate(table, 7) == 7
    assert table.block_ids == blocks


def test_drafts_are_never_registered() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    table, _ = manager.open([1] * 4)
    manager.grow(table, 9)  # 4 committed, 5 of a draft
    manager.register(table, [1] * 4, 4)
    assert cached_len(manager, [1] * 9) == 3


def test_growing_past_the_end_fails_and_changes_nothing() -> None:
    manager = BlockManager(2, BLOCK_SIZE)
    table, _ = manager.open([1])
    manager.grow(table, 4)
    assert not manager.can_grow(table, 7)
    with pytest.raises(OutOfBlocks):
        manager.grow(table, 7)
    assert len(table.block_ids) == 2
    manager.check_integrity()
