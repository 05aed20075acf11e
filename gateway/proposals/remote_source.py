"""Drafts from a drafter service: ask, wait a bounded time, else decode without a draft.

A drafter may be slow, wrong or gone; none of that is an error of the request. When it is lost the session decodes
without drafts at once, and looks for another drafter after each run. A drafter with an outstanding answer is not asked
again before that answer has come: one that hangs costs one timeout, not one per round. Not here: which drafter
(fleet/drafter_choice).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from outrider.gateway.metrics import DraftCame
from outrider.gateway.proposals.ask import Answer, Ask
from outrider.gateway.proposals.drafter_connection import ConnectionOptions, DrafterConnection, Lease, guess_after
from outrider.gateway.proposals.run_ahead import AheadTrials
from outrider.shared.errors import OutriderError
from outrider.shared.messages import Commit, HiddenStatesRequest, Proposal, ProposalReply, SessionSpec

# tokens; decoded without drafts between two attempts to find a drafter
ALONE_RUN = 16
# tokens; longest such run; each further timeout of a drafter doubles the run
LONGEST_ALONE_RUN = 256


class RemoteSource:
    """Asks one drafter at a time. `answer` waits no longer than ask.patience_s, and raises for no fault of a drafter.

    committed: the session's growing output; what the drafter has not been sent yet goes with the next ask.
    acquire(method): a lease on a drafter that serves the method; None: no drafter has room.
    trials: what is known of asking ahead; None: it is not done.
    """

    def __init__(
        self,
        spec: SessionSpec,
        committed: Sequence[int],
        acquire: Callable[[str], Lease | None],
        options: ConnectionOptions,
        trials: AheadTrials | None,
    ) -> None:
        self._spec = spec
        self._committed = committed
        self._acquire = acquire
        self._options = options
        self._trials = trials
        self._connection: DrafterConnection | None = None
        self._wanted_method = ""  # for which the drafter was found
        self._looks_ahead = False  # whether this round's ask may be followed by one for the next round
        self._open_sessions = 1  # at the verifier, as of its last commit
        # Outcome of a round without the late answer: NOT_WANTED if the request for it had no patience.
        self._missed = DraftCame.NO

    async def is_late(self) -> bool:
        """Returns whether an answer is still outstanding; drops one that has arrived since, as it is too old."""
        if self._connection is None or not self._connection.is_late:
            return False
        try:
            await self._connection.drop_late()
        except OutriderError:
            await self._lose()
            return False
        return self._connection.is_late

    async def open_early(self, method: str) -> None:
        """Opens a drafter that will be asked once the prompt is read; does nothing if none has room."""
        if self._connection is None:
            await self._open(method)

    def answer_while_late(self, ask: Ask) -> Answer:
        """Returns an answer without a draft: the drafter is not asked while its last answer is outstanding."""
        return Answer(ask, came=self._missed, max_new_tokens=self._alone_run())

    async def answer(self, ask: Ask) -> Answer:
        started = time.perf_counter()
        nothing = Answer(ask, came=DraftCame.NO)
        if self._connection is not None and ask.method != self._wanted_method:
            await self.close()
        if self._connection is None and not await self._open(ask.method):
            return dataclasses.replace(nothing, refused="no drafter has room", max_new_tokens=self._alone_run())
        if ask.committed_len == 0 or self._connection is None:
            return dataclasses.replace(nothing, max_new_tokens=1)  # the prefill's token comes without a draft
        answer = await self._ask(self._connection, ask)
        if answer.came is DraftCame.NOT_WANTED or (self._connection is not None and self._connection.is_late):
            return answer  # a timeout is no cost of the round that follows it
        return dataclasses.replace(answer, wait_s=time.perf_counter() - started)

    def observe(self, answer: Answer, commit: Commit, round_s: float | None) -> None:
        """Records one commit, whether or not this source drafted for it. round_s: None for a prefill."""
        if self._connection is not None:
            self._connection.hidden.take(commit.hidden_states)
        is_of_one_kind = answer.looks_ahead == answer.may_be_ahead
        if self._trials is not None and round_s is not None and answer.proposal is not None and is_of_one_kind:
            self._trials.observe(answer.method, self._open_sessions, round_s, ahead=answer.looks_ahead)
        self._open_sessions = commit.timings.open_sessions or self._open_sessions

    def hidden_states_request(self, committed_len: int) -> HiddenStatesRequest | None:
        """Returns the rows that the drafter needs next."""
        return self._connection.hidden.request(committed_len) if self._connection is not None else None

    async def close(self) -> None:
        """Leaves the drafter, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _open(self, wanted_method: str) -> bool:
        self._wanted_method = wanted_method
        lease = self._acquire(wanted_method)
        if lease is None:
            return False
        # From here on `close` releases the lease, whatever ends this.
        self._connection = DrafterConnection(lease, self._spec, self._committed, self._options)
        try:
            await self._connection.open()
            return True
        except (OutriderError, TimeoutError):
            await self.close()
            return False

    async def _ask(self, connection: DrafterConnection, ask: Ask) -> Answer:
        started, method = time.perf_counter(), connection.lease.method.name
        lost = Answer(ask, came=DraftCame.NO, method=method)
        try:
            if not await connection.has_hidden_states(ask.committed_len):
                # A round without a draft brings them.
                return Answer(ask, refused="hidden states are on their way", max_new_tokens=1)
            may_be_ahead, self._looks_ahead = self._looks_ahead, self._may_look_ahead(connection, ask)
            self._missed = DraftCame.NO if ask.patience_s > 0.0 else DraftCame.NOT_WANTED
            reply = await connection.ask(
                ask.committed_len, ask.num_draft_tokens, ask.patience_s, one_more=self._looks_ahead
            )
        except (OutriderError, TimeoutError):
            await self._lose()
            return dataclasses.replace(lost, refused="the drafter was lost", max_new_tokens=self._alone_run())
        if reply is None:
            alone = dataclasses.replace(lost, came=self._missed, method="", max_new_tokens=self._alone_run())
            return dataclasses.replace(alone, gave_up_s=time.perf_counter() - started)
        answer = self._answer_of(connection, ask, reply)
        return dataclasses.replace(answer, may_be_ahead=may_be_ahead, looks_ahead=self._looks_ahead)

    def _answer_of(self, connection: DrafterConnection, ask: Ask, reply: ProposalReply) -> Answer:
        proposal = self._ask_ahead(connection, ask, reply.proposal) if reply.proposal.token_ids else None
        return Answer(
            ask,
            came=DraftCame.YES if proposal is not None else DraftCame.EMPTY,
            proposal=proposal,
            method=connection.lease.method.name,
            drafter=connection.lease.address,
            timings=reply.timings,
            max_new_tokens=0 if proposal is not None else 1,
        )

    def _alone_run(self) -> int:
        """Returns the number of tokens to decode without drafts before asking again."""
        num_timeouts = self._connection.num_timeouts if self._connection is not None else 0
        return min(ALONE_RUN << max(0, num_timeouts - 1), LONGEST_ALONE_RUN)

    def _may_look_ahead(self, connection: DrafterConnection, ask: Ask) -> bool:
        """Returns whether to ask for the next proposal before this one is verified: if possible and expected to pay."""
        if self._trials is None or not connection.can_ask_ahead(ask.num_draft_tokens):
            return False
        return self._trials.allows(connection.lease.method.name, self._open_sessions)

    def _ask_ahead(self, connection: DrafterConnection, ask: Ask, proposal: Proposal) -> Proposal:
        """Cuts off the guess of the bonus token, and asks for the proposal that would follow it."""
        proposal, assumed = guess_after(proposal, ask.num_draft_tokens)
        if assumed and self._looks_ahead:
            connection.ask_ahead(assumed, proposal.base_len, ask.num_draft_tokens)
        return proposal

    async def _lose(self) -> None:
        self._options.metrics.drafters_lost.inc()
        if self._options.trace is not None:
            self._options.trace.add_event("drafter_lost")
        await self.close()
