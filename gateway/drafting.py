"""A session's side towards its drafter: ask, wait a bounded time, go on without.

A drafter may be slow, wrong or gone; none of that is an error of the request. When the drafter is lost the session
decodes alone at once, and asks for another drafter after each run. A drafter whose answer is late is not asked again
before that answer has come: one that hangs costs one timeout, not one per round.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence

from gateway.draft_policy import DraftPolicy, RoundOutcome
from gateway.hidden_flow import HiddenFlow
from gateway.interfaces import Drafter
from gateway.metrics import DraftCame, GatewayMetrics
from gateway.tracing import SessionTrace
from shared.errors import OutriderError
from shared.messages import (
    Commit,
    DraftMethodInfo,
    DraftStep,
    HiddenStatesRequest,
    Proposal,
    ProposalReply,
    SessionSpec,
    Timings,
    VerifyStep,
)

# Tokens a session decodes alone between two attempts to find a drafter.
ALONE_RUN = 16
# The same while a drafter keeps being late: twice as many after each further timeout.
LONGEST_ALONE_RUN = 256


class Lease:
    """A drafter chosen for a session; `release` gives its place back. `address` is "" offline."""

    def __init__(
        self, drafter: Drafter, method: DraftMethodInfo, release: Callable[[], None], address: str = ""
    ) -> None:
        self.drafter = drafter
        self.method = method
        self.release = release
        self.address = address


class Drafting:
    """`committed` is the session's growing output; what the drafter has not been told yet goes with the next ask.

    acquire(method): a place at a drafter that serves the method, or, where the policy leaves it open, at another.
    """

    def __init__(
        self,
        spec: SessionSpec,
        committed: Sequence[int],
        acquire: Callable[[str], Lease | None],
        policy: DraftPolicy | None,
        *,
        token_tree: bool,
        timeout_s: float,
        metrics: GatewayMetrics,
        trace: SessionTrace | None = None,
    ) -> None:
        self._spec = spec
        self._committed = committed
        self._acquire = acquire
        self._policy = policy
        self._token_tree = token_tree
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._trace = trace
        self._lease: Lease | None = None
        self._hidden: HiddenFlow | None = None
        self._late: asyncio.Task[ProposalReply] | None = None
        self._reported_len = 0
        # What the policy wanted when the drafter was found, and what was asked last.
        self._wanted_method = ""
        self._asked_method = ""
        # Of the round in progress: tokens wanted, what the drafter took for them, and how long the gateway waited.
        self._num_wanted = 0
        self._num_timeouts = 0  # without an answer in time between them
        self._draft_timings = Timings()
        self._draft_s = 0.0
        self._draft_came = DraftCame.NOT_WANTED
        self.clock = time.perf_counter

    async def propose(self, committed_len: int) -> Proposal | None:
        """A proposal that stands on `committed_len`, or None: no drafter, none worth it, too late, or no idea."""
        self._num_wanted, self._draft_timings, self._draft_s = 0, Timings(), 0.0
        self._draft_came = DraftCame.NOT_WANTED
        if self._policy is None:
            return None
        if await self._is_late():
            self._draft_came = DraftCame.NO
            return None
        started = self.clock()
        self._num_wanted = self._policy.num_draft_tokens()
        if self._num_wanted == 0:
            return None
        self._draft_came = DraftCame.NO
        if self._lease is not None and self._policy.method != self._wanted_method:
            await self.close()
        if self._lease is None and not await self._open(self._policy.method):
            return None
        if committed_len == 0:
            return None  # the verifier prefills meanwhile; its first token comes without a draft
        if not await self._has_hidden_states(committed_len):
            self._draft_came = DraftCame.NOT_WANTED
            return None  # a round without a draft brings them
        reply = await self._ask(committed_len, self._num_wanted)
        if self._late is None:  # a timeout is no cost of the round that follows it; draft_timeouts counts it
            self._draft_s = self.clock() - started
        if reply is None:
            return None
        self._draft_timings = reply.timings
        self._draft_came = DraftCame.YES if reply.proposal.token_ids else DraftCame.EMPTY
        return reply.proposal if reply.proposal.token_ids else None

    def free_run_budget(self) -> int:
        """Tokens the verifier may commit by itself in a round without a draft."""
        if self._policy is None:
            return self._spec.sampling_params.max_tokens
        if self._late is None and self._num_wanted == 0:
            return self._policy.free_run()
        if self._lease is None or self._late is not None:
            return min(ALONE_RUN << max(0, self._num_timeouts - 1), LONGEST_ALONE_RUN)
        return 1

    def hidden_states_request(self, committed_len: int) -> HiddenStatesRequest | None:
        """The rows that the drafter needs next."""
        return self._hidden.request(committed_len) if self._hidden is not None else None

    def signed(self, step: VerifyStep, commit: Commit) -> Commit:
        """The commit, with who drafted what it scored."""
        if step.proposal is None or commit.num_draft_tokens == 0:
            return commit
        address = self._lease.address if self._lease is not None else ""
        return dataclasses.replace(commit, drafter=address, draft_method=step.proposal.method)

    def observe(self, step: VerifyStep, commit: Commit, verify_s: float) -> None:
        """One commit: what it cost and how much of the draft was good."""
        if self._hidden is not None:
            self._hidden.take(commit.hidden_states)
        round_s = verify_s + self._draft_s
        is_prefill = commit.base_len == len(self._spec.committed_token_ids)
        if not is_prefill:
            forward_s = (commit.timings.forward_us + self._draft_timings.forward_us) * 1e-6
            overhead_s = max(0.0, round_s - forward_s)
            self._metrics.observe_round(round_s, overhead_s, len(commit.token_ids), speculation=self._draft_s > 0.0)
            self._metrics.observe_draft(self._draft_came)
        if self._policy is not None:
            self._policy.observe(self._outcome(commit, round_s))
        method = step.proposal.method if step.proposal else ""
        self._metrics.observe_commit(commit, method)
        if self._trace is not None:
            self._trace.add_round(commit, method, verify_s, self._draft_s, self._draft_timings)
        self._draft_timings, self._draft_s = Timings(), 0.0

    def _outcome(self, commit: Commit, round_s: float) -> RoundOutcome:
        verifier, drafter = commit.timings, self._draft_timings
        # Only a round that waited for the drafter tells what asking it costs.
        has_answer = self._draft_s > 0.0
        return RoundOutcome(
            num_asked=self._num_wanted if has_answer else 0,
            num_draft_tokens=commit.num_draft_tokens,
            num_accepted=commit.num_accepted_tokens,
            batch_sessions=verifier.batch_sessions,
            marginal_row_s=verifier.marginal_row_us * 1e-6,
            tokens_per_s=verifier.tokens_per_s,
            method=self._asked_method if has_answer else "",
            round_tokens=verifier.round_tokens,
            round_s=verifier.round_us * 1e-6,
            open_sessions=verifier.open_sessions,
            draft_s=drafter.forward_us * 1e-6,
            overhead_s=max(0.0, round_s - (verifier.total_us + drafter.total_us) * 1e-6),
        )

    async def close(self) -> None:
        """Gives the place back first: whatever is cancelled in here, it is given back."""
        late, self._late = self._late, None
        lease, self._lease = self._lease, None
        self._hidden = None
        if late is not None:
            late.cancel()
        if lease is not None:
            lease.release()
            await asyncio.shield(_end(lease, late))

    async def _open(self, wanted_method: str) -> bool:
        self._wanted_method = wanted_method
        lease = self._acquire(wanted_method)
        if lease is None:
            return False
        committed = tuple(self._committed)
        spec = dataclasses.replace(self._spec, method=lease.method.name, committed_token_ids=committed)
        self._lease = lease  # from here on `close` gives the place back, whatever ends this
        if not await self._in_time(lease.drafter.open(spec)):
            return False
        self._hidden = HiddenFlow(lease.method, len(self._spec.prompt_token_ids))
        self._reported_len = len(committed)
        return True

    async def _ask(self, committed_len: int, num_draft_tokens: int) -> ProposalReply | None:
        if self._lease is None:
            return None
        self._asked_method = self._lease.method.name
        step = self._step(committed_len, num_draft_tokens)
        asking = asyncio.create_task(self._lease.drafter.propose(step))
        try:
            await asyncio.wait({asking}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        self._reported_len = committed_len
        if not asking.done():
            self._metrics.draft_timeouts.inc()
            if self._trace is not None:
                self._trace.add_event("draft_timeout")
            self._late = asking
            self._num_timeouts += 1
            return None
        self._num_timeouts = 0
        return await self._reply_of(asking)

    def _step(self, committed_len: int, num_draft_tokens: int) -> DraftStep:
        """Reports what has been committed, and the hidden states that have come, since the last step."""
        return DraftStep(
            epoch=self._spec.epoch,
            base_len=self._reported_len,
            committed_token_ids=tuple(self._committed[self._reported_len : committed_len]),
            num_draft_tokens=num_draft_tokens,
            hidden_states=self._hidden.hand_over() if self._hidden is not None else (),
            max_tree_nodes=num_draft_tokens if self._token_tree else 0,
        )

    async def _has_hidden_states(self, committed_len: int) -> bool:
        """Whether the drafter can be asked; if not, it is sent what has come so far (a long prompt comes in parts)."""
        if self._lease is None or self._hidden is None or self._hidden.has_all(committed_len):
            return True
        if not await self._in_time(self._lease.drafter.advance(self._step(committed_len, 0))):
            self._count_lost()
            return True
        self._reported_len = committed_len
        return False

    def _count_lost(self) -> None:
        self._metrics.drafters_lost.inc()
        if self._trace is not None:
            self._trace.add_event("drafter_lost")

    async def _in_time(self, telling: Awaitable[None]) -> bool:
        """Whether the drafter took what it was told. One that did not, in time, is given up."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await telling
            return True
        except (OutriderError, TimeoutError):
            await self.close()
            return False

    async def _is_late(self) -> bool:
        """Whether the drafter still owes an answer. One that has come by now stands too far back and is dropped."""
        late = self._late
        if late is None or not late.done():
            return late is not None
        self._late = None
        await self._reply_of(late)
        return False

    async def _reply_of(self, asking: asyncio.Task[ProposalReply]) -> ProposalReply | None:
        try:
            reply = await asking
            if self._hidden is not None:
                self._hidden.rewind(reply.missing_hidden_from)
            return reply
        except OutriderError:
            self._count_lost()
            await self.close()
            return None


async def _end(lease: Lease, late: asyncio.Task[ProposalReply] | None) -> None:
    if late is not None:
        await asyncio.gather(late, return_exceptions=True)
    await lease.drafter.close()
