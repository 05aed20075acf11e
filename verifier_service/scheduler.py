"""Plans the rows of the next forward pass: continuous batching, chunked prefill, preemption. No torch.

Decoding sessions come first, in order of arrival. The rest of the row budget goes to prefills, in small chunks under an
inter-token latency objective. When blocks run out, drafts are dropped first. Then, or when recurrent states run out,
the youngest session that is not yet in the batch is preempted: it frees all it holds and is recomputed later.
Preemption costs time, never tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.attention.block_manager import BlockManager, BlockTable, OutOfBlocks
from outrider.engine.recurrent.table import OutOfSlots, StateTable
from outrider.shared.messages import Proposal
from outrider.verifier_service.session import VerifierSession, reconcile

# rows per forward; lower bound for prompts, so that they always progress; a80adfd: they cost little more than one row
MIN_PROMPT_ROWS = 4


@dataclass(frozen=True)
class Work:
    """One session's rows in a forward: `num_chain_rows` committed tokens, then the proposal's nodes.

    `num_logits_rows` is 0 for a prefill chunk that does not reach the end of the committed tokens.
    """

    session: VerifierSession
    table: BlockTable
    num_chain_rows: int
    proposal: Proposal | None
    num_logits_rows: int

    @property
    def num_rows(self) -> int:
        return self.num_chain_rows + (len(self.proposal.token_ids) if self.proposal else 0)

    @property
    def samples(self) -> bool:
        """True if this work reaches the last committed token, so that a token can be chosen."""
        return self.num_chain_rows == self.session.num_pending


@dataclass
class Scheduler:
    blocks: BlockManager
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    # Most rows of a forward that reads prompts while sessions decode; None: max_num_batched_tokens.
    rows_while_decoding: Callable[[], int] | None = None
    num_preemptions: int = 0
    # Recurrent states; None: the model has no recurrent layers.
    states: StateTable | None = None
    # positions; distance of the states that the prefix cache keeps, in addition to those at the ends of prompts;
    # chosen: at Qwen3.5's sizes a state is then as large as the keys and values of these positions
    snapshot_interval: int = 2048
    # draft tokens; what a slot's log has room for, with recurrent layers
    most_draft_tokens: int = sys.maxsize

    def plan(self, sessions: Sequence[VerifierSession]) -> list[Work]:
        """Work for the next forward, in batch order; empty if no session waits or nothing fits."""
        waiting = [session for session in sessions if session.is_ready]
        # The oldest goes first even if it must be recomputed: planned sessions cannot be preempted, and a preempted one
        # must not starve while younger ones keep coming.
        oldest = min(waiting, key=lambda session: session.opened_at, default=None)
        waiting.sort(key=lambda session: (session is not oldest, session.num_pending > 1, session.step_arrived_at))
        budget, prompt_budget = self.max_num_batched_tokens, self._prompt_budget(sessions)
        plan: list[Work] = []
        for session in waiting:
            is_prompt = session.num_pending > 1
            room = min(budget, prompt_budget) if is_prompt else budget
            if room <= 0:
                break
            work = self._plan_one(session, room, sessions, {id(work.session) for work in plan})
            if work is not None:
                plan.append(work)
                budget -= work.num_rows
                # At least some rows for a prompt, or prompts would starve while others decode.
                least = 0 if is_prompt else MIN_PROMPT_ROWS
                prompt_budget = max(least, prompt_budget - work.num_rows)
        return plan

    def _prompt_budget(self, sessions: Sequence[VerifierSession]) -> int:
        """Most rows of a forward that reads prompts."""
        if self.rows_while_decoding is None or not any(other.has_replied and not other.finished for other in sessions):
            return self.max_num_batched_tokens
        return max(MIN_PROMPT_ROWS, self.rows_while_decoding())

    def _plan_one(
        self, session: VerifierSession, budget: int, sessions: Sequence[VerifierSession], planned: set[int]
    ) -> Work | None:
        table = self._table(session)
        chunk = min(session.num_pending, self.prefill_chunk_size, budget)
        if self.states is not None:
            start = session.num_computed
            stops = self._snapshot_positions(session, start, start + chunk)
            chunk = stops[0] - start if stops else chunk
        proposal = None
        if chunk == session.num_pending:
            proposal = self._fitting_proposal(session, budget - chunk)
        if proposal is not None and not self.blocks.can_grow(
            table, session.num_computed + chunk + len(proposal.token_ids)
        ):
            proposal = None
        while True:
            num_positions = session.num_computed + chunk + (len(proposal.token_ids) if proposal else 0)
            try:
                self.blocks.grow(table, num_positions)
                if self.states is not None and session.state is not None:
                    self.states.reserve(session.state)
                break
            except (OutOfBlocks, OutOfSlots):
                victim = self._victim(session, sessions, planned)
                if victim is None:
                    return None
                self.preempt(victim)
        num_logits = 0
        if chunk == session.num_pending:
            num_logits = 1 + (len(proposal.token_ids) if proposal else 0)
        if session.spec.sampling_params.num_prompt_logprobs is not None and session.num_computed < session.prompt_len:
            num_logits = chunk + (len(proposal.token_ids) if proposal else 0)
        return Work(session, table, chunk, proposal, num_logits)

    def _table(self, session: VerifierSession) -> BlockTable:
        if session.table is None:
            wants_prompt_logits = session.spec.sampling_params.num_prompt_logprobs is not None
            # Cached positions have no logits, so a session that wants prompt logits computes the whole prompt.
            lookup = [] if wants_prompt_logits else session.token_ids
            if self.states is None:
                session.table, session.num_computed = self.blocks.open(lookup, session.spec.cache_salt)
            else:
                session.table, session.num_computed = self.blocks.open(
                    lookup, session.spec.cache_salt, self.states.has_snapshot
                )
                hashes = session.table.block_hashes
                session.state = self.states.open(hashes[-1] if hashes else None)
            session.num_cached_tokens = min(session.num_computed, session.prompt_len)
        return session.table

    def _snapshot_positions(self, session: VerifierSession, start: int, end: int) -> list[int]:
        """Ascending positions in (start, end] whose recurrent state the prefix cache keeps: each at a block's end."""
        if not self.blocks.prefix_caching:
            return []
        size = self.blocks.block_size
        interval = max(size, self.snapshot_interval // size * size)
        # The longest prefix that an equal prompt, or the next turn of a chat, can begin with.
        prompt_end = (session.prompt_len - 1) // size * size
        first = start // interval * interval + interval
        return sorted(place for place in {prompt_end, *range(first, end + 1, interval)} if start < place <= end)

    def settle(self, work: Work, kept_nodes: Sequence[int] = (), token_ids: Sequence[int] = ()) -> None:
        """Accounts for a forward: its chain rows and the kept nodes are computed, and `token_ids` are committed.

        The nodes' KV rows must be in the slots of a chain. The forward wrote the recurrent state before the last chain
        row; that row and the draft's are in its log.
        """
        session, end = work.session, work.session.num_computed + work.num_chain_rows
        session.token_ids.extend(token_ids)
        session.num_computed = min(end + len(kept_nodes), len(session.token_ids) - 1)
        self.blocks.truncate(work.table, session.num_computed)
        if self.states is not None and session.state is not None:
            self.states.settle(session.state, end - 1, [0, *(1 + node for node in kept_nodes)])
            self.states.rewind(session.state, session.num_computed)
        self._register(session, work.table)

    def _register(self, session: VerifierSession, table: BlockTable) -> None:
        """Puts what was computed into the prefix cache, with recurrent states at some blocks' ends."""
        self.blocks.register(table, session.token_ids, session.num_computed)
        if self.states is None or session.state is None:
            return
        for position in self._snapshot_positions(session, session.state.base - 1, session.num_computed):
            place = position // self.blocks.block_size
            if 0 < place <= len(table.block_hashes):
                self.states.keep(session.state, table.block_hashes[place - 1], position)

    def _fitting_proposal(self, session: VerifierSession, budget: int) -> Proposal | None:
        """The round's proposal, cut to what can still be committed; depends on lengths only, never on tokens."""
        if session.proposal is None:
            return None
        proposal = reconcile(session.proposal, session.committed_len, session.output_token_ids)
        if proposal is None:
            return None
        room = min(session.draft_room(self.max_model_len), budget, self.most_draft_tokens)
        if room <= 0:
            return None
        if len(proposal.token_ids) <= room:
            return proposal
        return Proposal(
            base_len=proposal.base_len,
            token_ids=proposal.token_ids[:room],
            method=proposal.method,
            parents=proposal.parents[:room],
            laws=proposal.laws[:room],
            confidence=proposal.confidence[:room],
        )

    def _victim(
        self, session: VerifierSession, sessions: Sequence[VerifierSession], planned: set[int]
    ) -> VerifierSession | None:
        """The youngest session with blocks that is idle or younger than `session`: so the oldest always progresses."""
        holders = [
            other
            for other in sessions
            if other is not session
            and id(other) not in planned
            and other.table is not None
            and other.table.block_ids
            and (other.step is None or other.opened_at > session.opened_at)
        ]
        return max(holders, key=lambda other: other.opened_at, default=None)

    def preempt(self, session: VerifierSession) -> None:
        """Frees all blocks; the session is recomputed, from the prefix cache if it is still there."""
        self.release(session)
        self.num_preemptions += 1

    def release(self, session: VerifierSession) -> None:
        if session.table is not None:
            self.blocks.close(session.table)
        if self.states is not None and session.state is not None:
            self.states.close(session.state)
        session.table = session.state = None
        session.num_computed = 0
        session.prompt_logprobs.clear()

    def cut_back(self, session: VerifierSession, committed_len: int) -> None:
        """Drops output tokens from `committed_len` on, and their KV."""
        if committed_len >= session.committed_len:
            return
        del session.token_ids[session.prompt_len + committed_len :]
        if session.table is not None:
            keep = min(session.num_computed, len(session.token_ids) - 1)
            session.num_computed = self.blocks.truncate(session.table, keep)
            if self.states is not None and session.state is not None:
                position = self.states.rewind(session.state, session.num_computed)
                if position < session.num_computed:
                    self.release(session)  # computed again, from a cached prefix if there is one
        if committed_len <= len(session.spec.committed_token_ids):
            # The first reply was lost: it is sent again with everything that only the first reply carries.
            session.has_replied = False
            if session.spec.sampling_params.num_prompt_logprobs is not None:
                self.release(session)

    def forget(self) -> None:
        """Drops what is cached of no session: it was computed with other weights."""
        self.blocks.forget()
        if self.states is not None:
            self.states.forget()

    def check_integrity(self) -> None:
        """Raises IntegrityError if the bookkeeping of blocks or states is broken."""
        self.blocks.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
