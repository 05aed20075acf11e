"""A session's side towards its drafter: ask, wait a bounded time, go on without.

A drafter may be slow, wrong or gone; none of that is an error of the request. When the drafter is lost the session
decodes alone at once, and asks for another drafter after each run. A drafter whose answer is late is not asked again
before that answer has come: one that hangs costs one timeout, not one per round. Where a proposal cannot change the
output, an answer is waited for only as long as the policy finds it worth; what comes later still tells it something.

A verifier that serves the method wanted by itself is asked to draft in its own rounds, and no drafter is.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from gateway.draft_policy import DraftPolicy, RoundOutcome
from gateway.drafter_line import DrafterLine, Lease, LineOptions, guess_after
from gateway.local_line import NO_LOCAL_METHODS, LocalLine, LocalMethods
from gateway.metrics import DraftCame, GatewayMetrics
from gateway.run_ahead import AheadTrials
from gateway.tracing import SessionTrace
from shared.errors import OutriderError
from shared.messages import (
    Commit,
    HiddenStatesRequest,
    LocalDrafts,
    Proposal,
    ProposalReply,
    SessionSpec,
    SteerRun,
    Timings,
    VerifyStep,
)
from shared.sampling_params import SpeculationMode

# Tokens a session decodes alone between two attempts to find a drafter.
ALONE_RUN = 16
# The same while a drafter keeps being late: twice as many after each further timeout.
LONGEST_ALONE_RUN = 256
# Tokens of a verifier that drafts by itself between two looks at what pays: it is told while it goes on.
DECISION_TOKENS = 8


class Drafting:
    """`committed` is the session's growing output; what the drafter has not been told yet goes with the next ask.

    acquire(method): a place at a drafter that serves the method, or, where the policy leaves it open, at another.
    local: what the session's verifier can draft with by itself.
    trials: what is known of asking ahead; None: it is not done.
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
        local: LocalMethods = NO_LOCAL_METHODS,
        trace: SessionTrace | None = None,
        trials: AheadTrials | None = None,
    ) -> None:
        self._spec = spec
        self._committed = committed
        self._acquire = acquire
        self._policy = policy
        self._local = LocalLine(local, token_tree=token_tree)
        self._options = LineOptions(token_tree, timeout_s, metrics, trace)
        # In rejection mode what is kept of a draft must not depend on its own tokens, nor on when it came.
        self._is_exact = spec.mode is SpeculationMode.EXACT
        self._trials = trials if self._is_exact and not token_tree else None
        self._line: DrafterLine | None = None
        # What the verifier is to draft by itself in the run in progress; None: nothing.
        self.local_drafts: LocalDrafts | None = None
        # Tokens until the policy is asked again within the run; and whether the run begins with the prefill.
        self._until_decision = math.inf
        self._is_first = True
        # What the policy wanted when the drafter was found, and what was asked last.
        self._wanted_method = ""
        self._asked_method = ""
        self._open_sessions = 1
        # What the verifier has told last; it tells again what has changed.
        self._draft_rows_s: tuple[float, ...] = ()
        # Whether the drafter was asked for more than this round, and in the round before.
        self._looks_ahead = self._looked_ahead = False
        # What a round that goes on without a late answer has missed: an answer that nobody waits for, nothing.
        self._missed = DraftCame.NO
        # Of the round in progress: tokens wanted, what the drafter took for them, and how long the gateway waited.
        self._num_wanted = 0
        self._draft_timings = Timings()
        self._draft_s = 0.0
        self._draft_came = DraftCame.NOT_WANTED
        self.clock = time.perf_counter

    async def propose(self, committed_len: int) -> Proposal | None:
        """A proposal that stands on `committed_len`, or None: no drafter, none worth it, too late, or no idea."""
        self._num_wanted, self._draft_timings, self._draft_s = 0, Timings(), 0.0
        self._draft_came = DraftCame.NOT_WANTED
        self.local_drafts, self._until_decision = None, math.inf
        self._is_first = committed_len == len(self._spec.committed_token_ids)
        if self._policy is None:
            return None
        if await self._is_late():
            self._draft_came = self._missed
            return None
        started = self.clock()
        self._num_wanted = self._policy.num_draft_tokens(before_prefill=committed_len == 0)
        if self._num_wanted == 0:
            return None
        self.local_drafts = self._local.drafts(self._policy.method, self._num_wanted)
        if self.local_drafts is not None:
            return None
        self._draft_came = DraftCame.NO
        if self._line is not None and self._policy.method != self._wanted_method:
            await self.close()
        if self._line is None and not await self._open(self._policy.method):
            return None
        if committed_len == 0:
            return None  # the verifier prefills meanwhile; its first token comes without a draft
        reply = await self._ask(committed_len)
        if self._line is not None and self._line.is_late:  # a timeout is no cost of the round that follows it
            self._draft_came = self._missed
        elif self._draft_came is not DraftCame.NOT_WANTED:
            self._draft_s = self.clock() - started
        if reply is None:
            return None
        self._draft_timings = reply.timings
        self._draft_came = DraftCame.YES if reply.proposal.token_ids else DraftCame.EMPTY
        return self._ask_ahead(reply.proposal) if reply.proposal.token_ids else None

    def free_run_budget(self) -> int:
        """Tokens the verifier may commit by itself, without a draft or with its own."""
        if self._policy is None:
            return self._spec.sampling_params.max_tokens
        is_late = self._line is not None and self._line.is_late
        if self.local_drafts is not None or (not is_late and self._num_wanted == 0):
            if self._local.is_there:
                # Before the prefill nobody knows what others come with it; its commit tells.
                self._until_decision = 1 if self._is_first else min(self._policy.free_run(), DECISION_TOKENS)
                return self._spec.sampling_params.max_tokens
            return self._policy.free_run()
        if self._line is None or is_late:
            num_timeouts = self._line.num_timeouts if self._line is not None else 0
            return min(ALONE_RUN << max(0, num_timeouts - 1), LONGEST_ALONE_RUN)
        return 1

    def steering(self) -> SteerRun | None:
        """What the verifier's run in progress should be told now; a return to the gateway would cost it a turn."""
        if self._policy is None or self._until_decision > 0:
            return None
        num_draft_tokens = self._policy.num_draft_tokens()
        wanted = self._local.drafts(self._policy.method, num_draft_tokens)
        self._until_decision = min(self._policy.free_run(), DECISION_TOKENS)
        if num_draft_tokens and wanted is None:  # a drafter is to be asked
            self._until_decision = math.inf
            return SteerRun(self._spec.epoch, ends=True)
        before, self.local_drafts = self.local_drafts, wanted
        return SteerRun(self._spec.epoch, wanted) if wanted != before else None

    def hidden_states_request(self, committed_len: int) -> HiddenStatesRequest | None:
        """The rows that the drafter needs next."""
        return self._line.hidden.request(committed_len) if self._line is not None else None

    def signed(self, step: VerifyStep, commit: Commit) -> Commit:
        """The commit, with who drafted what it scored."""
        if commit.num_draft_tokens == 0:
            return commit
        address = self._line.lease.address if self._line is not None else ""
        if commit.local_drafts is not None:
            address = self._local.address
        return dataclasses.replace(commit, drafter=address, draft_method=_method_of(step, commit))

    def observe(self, step: VerifyStep, commit: Commit, verify_s: float) -> None:
        """One commit: what it cost and how much of the draft was good."""
        if self._line is not None:
            self._line.hidden.take(commit.hidden_states)
        if commit.local_drafts is not None:
            verify_s -= self._take_local(commit.local_drafts, commit)
        round_s = verify_s + self._draft_s
        is_prefill = commit.base_len == len(self._spec.committed_token_ids)
        if not is_prefill:
            metrics, num_tokens = self._options.metrics, len(commit.token_ids)
            # What the drafter did while the verifier worked is no part of the round.
            forward_s = commit.timings.forward_us * 1e-6 + min(self._draft_timings.forward_us * 1e-6, self._draft_s)
            overhead_s = max(0.0, round_s - forward_s)
            metrics.observe_round(round_s, overhead_s, num_tokens, speculation=self._draft_s > 0.0)
            metrics.observe_draft(self._draft_came)
            if self._trials is not None and step.proposal is not None and self._looks_ahead == self._looked_ahead:
                self._trials.observe(self._asked_method, self._open_sessions, round_s, ahead=self._looks_ahead)
        self._open_sessions = commit.timings.open_sessions or self._open_sessions
        if commit.timings.draft_rows_us:
            self._draft_rows_s = tuple(1e-6 * rows_us for rows_us in commit.timings.draft_rows_us)
        self._until_decision -= len(commit.token_ids)
        if self._policy is not None:
            self._policy.observe(self._outcome(commit, round_s, is_prefill=is_prefill))
        method = _method_of(step, commit)
        self._options.metrics.observe_commit(commit, method)
        if self._options.trace is not None:
            self._options.trace.add_round(commit, method, verify_s, self._draft_s, self._draft_timings)
        self._draft_timings, self._draft_s = Timings(), 0.0
        if commit.local_drafts is not None:  # each round of a run tells for itself
            self._draft_came = DraftCame.NOT_WANTED

    def _take_local(self, drafts: LocalDrafts, commit: Commit) -> float:
        """A round that the verifier drafted for by itself, as if a drafter had answered; returns how long it took."""
        draft_us, self._num_wanted, self._asked_method = commit.timings.draft_us, drafts.num_draft_tokens, drafts.method
        self._draft_timings, self._draft_s = Timings(forward_us=draft_us, total_us=draft_us), draft_us * 1e-6
        self._draft_came = DraftCame.YES if commit.num_draft_tokens else DraftCame.EMPTY
        self._local.answered(drafts.method, commit)
        return self._draft_s

    def _room(self, commit: Commit) -> int:
        """Draft tokens that could be used: the end of the output cuts them off, which says nothing of the drafter."""
        return max(0, self._spec.sampling_params.max_tokens - commit.base_len - 1)

    def _num_beyond_end(self, commit: Commit, num_asked: int) -> int:
        """Draft tokens that were wanted, and not asked for as there was no room for them."""
        num_wanted = self.local_drafts.num_draft_tokens if self.local_drafts is not None else self._num_wanted
        return max(0, num_wanted - num_asked) if num_asked == self._room(commit) else 0

    def _outcome(self, commit: Commit, round_s: float, *, is_prefill: bool) -> RoundOutcome:
        verifier, drafter = commit.timings, self._draft_timings
        # What the drafter did while the verifier worked cost the round nothing.
        drafter_s = min(drafter.total_us * 1e-6, self._draft_s)
        # Only a round that waited for the drafter tells what asking it costs.
        has_answer = self._draft_s > 0.0
        num_asked = min(self._num_wanted, self._room(commit)) if has_answer else 0
        draft_s = min(drafter.forward_us * 1e-6, drafter_s)
        if not verifier.draft_depth:
            draft_s *= num_asked / max(1, self._num_wanted)
        verifier_s = (verifier.total_us - verifier.draft_us) * 1e-6
        is_catch_up = self._line is not None and self._line.is_catch_up
        return RoundOutcome(
            num_asked=num_asked,
            num_draft_tokens=commit.num_draft_tokens,
            num_accepted=commit.num_accepted_tokens,
            batch_sessions=verifier.batch_sessions,
            draft_rows_s=self._draft_rows_s,
            tokens_per_s=verifier.tokens_per_s,
            method=self._asked_method if has_answer else "",
            round_tokens=verifier.round_tokens,
            round_s=verifier.round_us * 1e-6,
            open_sessions=verifier.open_sessions,
            may_be_ahead=self._looked_ahead,
            is_catch_up=self._local.is_catch_up if verifier.draft_us else is_catch_up,
            draft_depth=verifier.draft_depth,
            num_beyond_end=self._num_beyond_end(commit, num_asked),
            draft_s=draft_s,
            # Nothing travels where the verifier drafts by itself.
            overhead_s=0.0 if verifier.draft_us else max(0.0, round_s - verifier_s - drafter_s),
            verify_s=0.0 if is_prefill else verifier_s,
        )

    async def close(self) -> None:
        """Leaves the drafter, if there is one."""
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    async def _open(self, wanted_method: str) -> bool:
        self._wanted_method = wanted_method
        lease = self._acquire(wanted_method)
        if lease is None:
            return False
        # From here on `close` gives the place back, whatever ends this.
        self._line = DrafterLine(lease, self._spec, self._committed, self._options)
        try:
            await self._line.open()
            return True
        except (OutriderError, TimeoutError):
            await self.close()
            return False

    async def _ask(self, committed_len: int) -> ProposalReply | None:
        if self._line is None or self._policy is None:
            return None
        line, num_draft_tokens = self._line, self._num_wanted
        try:
            if not await line.has_hidden_states(committed_len):
                self._draft_came = DraftCame.NOT_WANTED
                return None  # a round without a draft brings them
            self._asked_method = line.lease.method.name
            self._looked_ahead, self._looks_ahead = self._looks_ahead, self._may_look_ahead(line)
            patience_s = self._policy.patience_s if self._is_exact else math.inf
            self._missed = DraftCame.NO if patience_s > 0.0 else DraftCame.NOT_WANTED
            return await line.ask(committed_len, num_draft_tokens, patience_s, one_more=self._looks_ahead)
        except (OutriderError, TimeoutError):
            await self._lose()
            return None

    def _may_look_ahead(self, line: DrafterLine) -> bool:
        """Whether the next proposal may be asked for before this one is verified, and it is thought to pay."""
        if self._trials is None or not line.can_ask_ahead(self._num_wanted):
            return False
        return self._trials.allows(self._asked_method, self._open_sessions)

    def _ask_ahead(self, proposal: Proposal) -> Proposal:
        """Cuts off the guess of the bonus token, and asks for what would follow it."""
        proposal, assumed = guess_after(proposal, self._num_wanted)
        if assumed and self._looks_ahead and self._line is not None:
            self._line.ask_ahead(assumed, proposal.base_len, self._num_wanted)
        return proposal

    async def _is_late(self) -> bool:
        """Whether the drafter still owes an answer. One that has come by now stands too far back to be used."""
        if self._line is None or not self._line.is_late:
            return False
        try:
            answer = await self._line.late_answer()
        except OutriderError:
            await self._lose()
            return False
        if answer is not None and self._policy is not None and self._is_exact:
            self._policy.observe_late(answer)
        return self._line.is_late

    async def _lose(self) -> None:
        self._options.metrics.drafters_lost.inc()
        if self._options.trace is not None:
            self._options.trace.add_event("drafter_lost")
        await self.close()


def _method_of(step: VerifyStep, commit: Commit) -> str:
    """Whose draft the round had, or was to have; "" where it was nobody's."""
    if commit.local_drafts is not None:
        return commit.local_drafts.method
    return step.proposal.method if step.proposal is not None else ""
