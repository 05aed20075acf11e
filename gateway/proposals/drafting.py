"""One session's drafting: asks a drafter for what the verifier or the request wants, and records what came of it.

A method that the verifier serves is drafted there, within its own rounds; otherwise a drafter is asked. Where a
proposal cannot change the output, an answer is waited for only as long as the verifier finds it worth. Not here: how
many tokens `auto` drafts, and with which method (verifier_service/draft_length).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from outrider.gateway.metrics import DraftCame, GatewayMetrics
from outrider.gateway.proposals.ask import NO_LOCAL_METHODS, Answer, Ask, DraftHint, DraftPlan, LocalMethods
from outrider.gateway.proposals.drafter_connection import ConnectionOptions, Lease
from outrider.gateway.proposals.remote_source import RemoteSource
from outrider.gateway.proposals.run_ahead import AheadTrials
from outrider.gateway.request.types import METHOD_AUTO, SessionTrace
from outrider.shared.messages import (
    AutoDrafts,
    Commit,
    LocalDrafts,
    NextDraft,
    SessionSpec,
    Timings,
    VerifyStep,
)
from outrider.shared.sampling_params import SpeculationMode

# tokens; between two checks of what drafters serve; drafters come and go within seconds
_OFFERS_TOKENS = 64


class Drafting:
    """A session's drafting. Arguments as RemoteSource's. plan: None: no drafts. local: the verifier's methods."""

    def __init__(
        self,
        spec: SessionSpec,
        committed: Sequence[int],
        acquire: Callable[[str], Lease | None],
        plan: DraftPlan | None,
        *,
        timeout_s: float,
        metrics: GatewayMetrics,
        local: LocalMethods = NO_LOCAL_METHODS,
        hint: DraftHint | None = None,
        trace: SessionTrace | None = None,
        trials: AheadTrials | None = None,
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._local = local
        self._hint = hint or DraftHint()
        self._metrics = metrics
        self._trace = trace
        # Rejection mode: which draft tokens are used must depend neither on the tokens nor on when they arrive.
        self._is_exact = spec.mode is SpeculationMode.EXACT
        token_tree = plan is not None and plan.token_tree
        options = ConnectionOptions(token_tree, timeout_s, metrics, trace)
        ahead = trials if self._is_exact and not token_tree else None
        self._remote = RemoteSource(spec, committed, acquire, options, ahead)
        # The draft that the verifier wants from a drafter for the next round.
        self._next_draft: NextDraft | None = None
        # The choices of `auto` last sent to the verifier, and the output length at which they were checked.
        self._auto_drafts: AutoDrafts | None = None
        self._told_at = -_OFFERS_TOKENS

    async def propose(self, committed_len: int) -> Answer:
        """Returns the next round's basis: a drafter's proposal, drafts that the verifier is to make, or neither."""
        plan, max_tokens = self._plan, self._spec.sampling_params.max_tokens
        if plan is None:
            return Answer(Ask(committed_len), max_new_tokens=max_tokens)
        if await self._remote.is_late():
            return self._remote.answer_while_late(Ask(committed_len))
        if plan.method == METHOD_AUTO:
            return await self._auto_answer(committed_len)
        local = self._local.methods.get(plan.method)
        ask = Ask(committed_len, plan.method, plan.num_draft_tokens)
        if local is not None:
            drafts = LocalDrafts(plan.method, plan.num_draft_tokens, plan.token_tree and local.proposes_trees)
            return Answer(ask, local_drafts=drafts, max_new_tokens=max_tokens)
        if max_tokens == 1:  # the prompt's forward brings it; a drafter would be opened for nothing
            return Answer(ask, max_new_tokens=1)
        return await self._remote.answer(ask)

    async def _auto_answer(self, committed_len: int) -> Answer:
        """Returns the draft that the verifier wants; if it wants none from a drafter, a run until it does."""
        wanted = self._next_draft
        if wanted is None:
            if committed_len == 0 and self._hint.next_draft is not None:
                await self._remote.open_early(self._hint.next_draft.method)
            return Answer(Ask(committed_len), max_new_tokens=self._spec.sampling_params.max_tokens)
        patience_s = 1e-6 * wanted.patience_us if self._is_exact else math.inf
        return await self._remote.answer(Ask(committed_len, wanted.method, wanted.num_draft_tokens, patience_s))

    def step(self, answer: Answer, committed_len: int) -> VerifyStep:
        """Returns the verifier's next step with this answer."""
        was_wanted = self._next_draft is not None and answer.ask.num_draft_tokens > 0
        return VerifyStep(
            epoch=self._spec.epoch,
            base_len=committed_len,
            proposal=answer.proposal,
            max_new_tokens=answer.max_new_tokens,
            hidden_states=self._remote.hidden_states_request(committed_len),
            local_drafts=answer.local_drafts,
            auto_drafts=self._new_auto_drafts(committed_len),
            last_draft=answer.last_draft() if was_wanted else None,
        )

    def _new_auto_drafts(self, committed_len: int) -> AutoDrafts | None:
        """Returns the methods that `auto` may choose from; None if they are what the verifier was last sent."""
        plan = self._plan
        if plan is None or plan.method != METHOD_AUTO or committed_len < self._told_at + _OFFERS_TOKENS:
            return None
        self._told_at = committed_len
        auto = AutoDrafts(plan.num_draft_tokens, plan.token_tree, plan.offers(), plan.max_round_us)
        before, self._auto_drafts = self._auto_drafts, auto
        return auto if auto != before else None

    def signed(self, answer: Answer, commit: Commit) -> Commit:
        """Returns the commit with the method and the drafter of the draft that it scored."""
        if commit.num_draft_tokens == 0:
            return commit
        if commit.local_drafts is not None:
            return dataclasses.replace(commit, drafter=self._local.address, draft_method=commit.local_drafts.method)
        return dataclasses.replace(commit, drafter=answer.drafter, draft_method=_method_of(answer, commit))

    def observe(self, answer: Answer, commit: Commit, verify_s: float) -> None:
        """Records one commit: its cost, and how much of the draft was accepted. verify_s: how long the gateway waited
        for it.
        """
        drafted = answer.for_commit(commit) if commit.local_drafts is None else _local_answer(answer, commit)
        if commit.local_drafts is not None:
            verify_s -= drafted.wait_s  # which is part of it
        round_s = verify_s + drafted.wait_s
        is_prefill = commit.base_len == len(self._spec.committed_token_ids)
        if not is_prefill:
            self._count_round(drafted, commit, round_s)
        self._remote.observe(drafted, commit, None if is_prefill else round_s)
        if self._plan is not None and self._plan.method == METHOD_AUTO and not commit.more:
            self._next_draft = self._hint.next_draft = commit.next_draft
        method = _method_of(drafted, commit)
        self._metrics.observe_commit(commit, method)
        if self._trace is not None:
            self._trace.add_round(commit, method, verify_s, drafted.wait_s, drafted.timings)

    async def close(self) -> None:
        """Leaves the drafter, if there is one. May be called again."""
        await self._remote.close()

    def _count_round(self, drafted: Answer, commit: Commit, round_s: float) -> None:
        # The round does not include the drafter's work while the verifier is busy.
        drafter_forward_s = min(drafted.timings.forward_us * 1e-6, drafted.wait_s)
        overhead_s = max(0.0, round_s - commit.timings.forward_us * 1e-6 - drafter_forward_s)
        self._metrics.observe_round(round_s, overhead_s, len(commit.token_ids), speculation=drafted.wait_s > 0.0)
        self._metrics.observe_draft(drafted.came)


def _local_answer(answer: Answer, commit: Commit) -> Answer:
    """Returns the answer for the verifier's own drafting in the round, as if a drafter had given it."""
    draft_us = commit.timings.draft_us
    return Answer(
        answer.ask,
        came=DraftCame.YES if commit.num_draft_tokens else DraftCame.EMPTY,
        wait_s=draft_us * 1e-6,
        timings=Timings(forward_us=draft_us, total_us=draft_us),
    )


def _method_of(answer: Answer, commit: Commit) -> str:
    """Returns the method of the round's draft, requested or received; "" if it has none."""
    if commit.local_drafts is not None:
        return commit.local_drafts.method
    return answer.proposal.method if answer.proposal is not None else ""
