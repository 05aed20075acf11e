"""Which rows go into the next forward pass: continuous batching, chunked prefill, preemption. No torch.

Sessions that wait for tokens come first, in order of arrival; what is left of the row budget goes to prefills, in
small pieces where those who decode were promised not to wait long. When
blocks run out, drafts are dropped first, then the youngest session that is not yet in the batch gives all its blocks
back and is computed again later: preemption costs time, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_manager import BlockManager, BlockTable, OutOfBlocks
from shared.messages import Proposal
from verifier_service.session import VerifierSession, reconcile

# Prompts go on, however little time there is: so few rows cost hardly more than one.
LEAST_PROMPT_ROWS = 4


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
        """Whether this work reaches the last committed token, so that a token can be chosen."""
        return self.num_chain_rows == self.session.num_pending


@dataclass
class Scheduler:
    blocks: BlockManager
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    # The rows of a forward that reads prompts while somebody decodes; None: as many as ever.
    rows_while_decoding: Callable[[], int] | None = None
    num_preemptions: int = 0

    def plan(self, sessions: Sequence[VerifierSession]) -> list[Work]:
        """Work for the next forward, in batch order; empty when nobody waits or nothing fits."""
        waiting = [session for session in sessions if session.step is not None]
        # The oldest goes first even when it has to be computed again: planned sessions cannot be preempted, and a
        # preempted one must not wait for as long as younger ones keep coming.
        oldest = min(waiting, key=lambda session: session.opened_at, default=None)
        waiting.sort(key=lambda session: (session is not oldest, session.num_pending > 1, session.step_arrived_at))
        budget, prompt_budget = self.max_num_batched_tokens, self._prompt_budget(sessions)
        plan: list[Work] = []
        for session in waiting:
            is_prompt = session.num_pending > 1
            room = min(budget, prompt_budget) if is_prompt else budget
            if room <= 0:
                break
            work = self._place(session, room, sessions, {id(work.session) for work in plan})
            if work is not None:
                plan.append(work)
                budget -= work.num_rows
                # Some rows of somebody's prompt at least, or prompts would wait for as long as others decode.
                least = 0 if is_prompt else LEAST_PROMPT_ROWS
                prompt_budget = max(least, prompt_budget - work.num_rows)
        return plan

    def _prompt_budget(self, sessions: Sequence[VerifierSession]) -> int:
        """Rows of a forward that prompts may fill up."""
        if self.rows_while_decoding is None or not any(other.has_replied and not other.finished for other in sessions):
            return self.max_num_batched_tokens
        return max(LEAST_PROMPT_ROWS, self.rows_while_decoding())

    def _place(
        self, session: VerifierSession, budget: int, sessions: Sequence[VerifierSession], planned: set[int]
    ) -> Work | None:
        table = self._table(session)
        chunk = min(session.num_pending, self.prefill_chunk_size, budget)
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
                break
            except OutOfBlocks:
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
            # Cached positions have no logits, so a session that wants those of its prompt computes it anew.
            lookup = [] if wants_prompt_logits else session.token_ids
            session.table, session.num_computed = self.blocks.open(lookup, session.spec.cache_salt)
            session.num_cached_tokens = min(session.num_computed, session.prompt_len)
        return session.table

    def _fitting_proposal(self, session: VerifierSession, budget: int) -> Proposal | None:
        """The round's proposal, cut to what can still be committed; the cut looks at lengths, never at tokens."""
        if session.proposal is None:
            return None
        proposal = reconcile(session.proposal, session.committed_len, session.output_token_ids)
        if proposal is None:
            return None
        room = min(session.draft_room(self.max_model_len), budget)
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
        """The youngest holder of blocks that is idle or younger than `session`: the oldest always gets on."""
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
        """Gives back all blocks; the session is computed again, from the prefix cache if it is still there."""
        self.release(session)
        self.num_preemptions += 1

    def release(self, session: VerifierSession) -> None:
        if session.table is not None:
            self.blocks.close(session.table)
        session.table = None
        session.num_computed = 0
        session.prompt_logprobs.clear()

    def cut_back(self, session: VerifierSession, committed_len: int) -> None:
        """Forgets output tokens from `committed_len` on, and their KV."""
        if committed_len >= session.committed_len:
            return
        del session.token_ids[session.prompt_len + committed_len :]
        if session.table is not None:
            keep = min(session.num_computed, len(session.token_ids) - 1)
            session.num_computed = self.blocks.truncate(session.table, keep)
        if committed_len <= len(session.spec.committed_token_ids):
            # The first reply was lost: it goes out again with all that belongs to it.
            session.has_replied = False
            if session.spec.sampling_params.num_prompt_logprobs is not None:
                self.release(session)
