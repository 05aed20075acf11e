"""One session's drafting: what its policy wants, who can draft it, and what came of each round.

A method that the verifier serves is drafted there, within its own rounds; otherwise a drafter is asked. Where a
proposal cannot change the output, an answer is waited for only as long as the policy finds it worth; what comes later
is still observed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from outrider.gateway.draft_length.draft_policy import DraftPolicy
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.ask import Answer, Ask, DraftSource
from outrider.gateway.proposals.drafter_connection import ConnectionOptions, Lease
from outrider.gateway.proposals.local_source import NO_LOCAL_METHODS, LocalMethods, LocalSource
from outrider.gateway.proposals.remote_source import RemoteSource
from outrider.gateway.proposals.round_outcome import round_outcome
from outrider.gateway.proposals.run_ahead import AheadTrials
from outrider.gateway.request.types import SessionTrace
from outrider.shared.messages import Commit, HiddenStatesRequest, LocalDrafts, SessionSpec, SteerRun
from outrider.shared.sampling_params import SpeculationMode

# tokens; between two decisions on the local drafts of a run
DECISION_TOKENS = 8


class Drafting:
    """Arguments as RemoteSource's. policy: None: no drafts. local: the methods that the verifier serves."""

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
        self._policy = policy
        self._metrics = metrics
        self._trace = trace
        # In rejection mode what is kept of a draft must depend neither on its own tokens nor on when it came.
        self._is_exact = spec.mode is SpeculationMode.EXACT
        options = ConnectionOptions(token_tree, timeout_s, metrics, trace)
        ahead = trials if self._is_exact and not token_tree else None
        self._local = LocalSource(spec, local, token_tree=token_tree)
        self._remote = RemoteSource(spec, committed, acquire, options, ahead)
        # Of the run in progress: what the verifier drafts with, and tokens until the policy is asked again.
        self._run_drafts: LocalDrafts | None = None
        self._until_decision = math.inf
        # What the verifier has said last; it says again what has changed.
        self._draft_rows_s: tuple[float, ...] = ()

    async def propose(self, committed_len: int) -> Answer:
        """What the next round stands on: a draft, drafts of the verifier's own, or none."""
        max_tokens = self._spec.sampling_params.max_tokens
        self._run_drafts, self._until_decision = None, math.inf
        if self._policy is None:
            return Answer(Ask(committed_len), max_new_tokens=max_tokens)
        is_late, late_answer = await self._remote.late()
        if late_answer is not None and self._is_exact:
            self._policy.observe_late(late_answer)
        if is_late:
            return self._remote.answer_while_late(Ask(committed_len))
        ask = self._ask(self._policy, committed_len)
        answer = await self._local.answer(ask)
        if answer is None and max_tokens == 1:  # the prompt's forward brings it; a drafter would be opened for nothing
            return Answer(ask, max_new_tokens=1)
        if answer is None:
            return await self._remote.answer(ask)
        # The policy decides again while the run continues. Before the prefill nobody knows what others come with it.
        self._run_drafts = answer.local_drafts
        self._until_decision = 1 if self._is_prefill(committed_len) else min(ask.free_run, DECISION_TOKENS)
        return answer

    def _ask(self, policy: DraftPolicy, committed_len: int) -> Ask:
        num_draft_tokens = policy.num_draft_tokens(before_prefill=committed_len == 0)
        patience_s = policy.patience_s if self._is_exact else math.inf
        return Ask(committed_len, policy.method, num_draft_tokens, policy.free_run(), patience_s)

    def steering(self, committed_len: int) -> SteerRun | None:
        """A change for the verifier's run in progress; a return to the gateway would cost it a round."""
        if self._policy is None or self._until_decision > 0:
            return None
        ask = self._ask(self._policy, committed_len)
        wanted = self._local.drafts(ask)
        self._until_decision = min(ask.free_run, DECISION_TOKENS)
        if ask.num_draft_tokens and wanted is None:  # a drafter is to be asked
            self._until_decision = math.inf
            return SteerRun(self._spec.epoch, ends=True)
        before, self._run_drafts = self._run_drafts, wanted
        return SteerRun(self._spec.epoch, wanted) if wanted != before else None

    def hidden_states_request(self, committed_len: int) -> HiddenStatesRequest | None:
        """The rows that the drafter needs next."""
        return self._remote.hidden_states_request(committed_len)

    def signed(self, answer: Answer, commit: Commit) -> Commit:
        """The commit, with who drafted what it scored."""
        if commit.num_draft_tokens == 0:
            return commit
        if commit.local_drafts is not None:
            return dataclasses.replace(commit, drafter=self._local.address, draft_method=commit.local_drafts.method)
        return dataclasses.replace(commit, drafter=answer.drafter, draft_method=_method_of(answer, commit))

    def observe(self, answer: Answer, commit: Commit, verify_s: float) -> None:
        """One commit: what it cost and how much of the draft was good. verify_s: the gateway waited for it."""
        source: DraftSource = self._local if commit.local_drafts is not None else self._remote
        drafted = source.drafted(answer, commit)
        if commit.local_drafts is not None:
            verify_s -= drafted.wait_s  # which is part of it
        round_s = verify_s + drafted.wait_s
        is_prefill = self._is_prefill(commit.base_len)
        if not is_prefill:
            self._count_round(drafted, commit, round_s)
        self._remote.observe(drafted, commit, None if is_prefill else round_s)
        if commit.timings.draft_rows_us:
            self._draft_rows_s = tuple(1e-6 * rows_us for rows_us in commit.timings.draft_rows_us)
        self._until_decision -= len(commit.token_ids)
        if self._policy is not None:
            outcome = round_outcome(
                drafted,
                commit,
                round_s=round_s,
                is_prefill=is_prefill,
                num_wanted=(self._run_drafts or drafted.ask).num_draft_tokens,
                max_tokens=self._spec.sampling_params.max_tokens,
                draft_rows_s=self._draft_rows_s,
            )
            self._policy.observe(outcome)
        method = _method_of(drafted, commit)
        self._metrics.observe_commit(commit, method)
        if self._trace is not None:
            self._trace.add_round(commit, method, verify_s, drafted.wait_s, drafted.timings)

    async def close(self) -> None:
        """Leave the drafter, if there is one; may be called again."""
        await self._local.close()
        await self._remote.close()

    def _count_round(self, drafted: Answer, commit: Commit, round_s: float) -> None:
        # What the drafter did while the verifier worked is no part of the round.
        drafter_forward_s = min(drafted.timings.forward_us * 1e-6, drafted.wait_s)
        overhead_s = max(0.0, round_s - commit.timings.forward_us * 1e-6 - drafter_forward_s)
        self._metrics.observe_round(round_s, overhead_s, len(commit.token_ids), speculation=drafted.wait_s > 0.0)
        self._metrics.observe_draft(drafted.came)

    def _is_prefill(self, base_len: int) -> bool:
        return base_len == len(self._spec.committed_token_ids)


def _method_of(answer: Answer, commit: Commit) -> str:
    """Whose draft the round had, or was to have; "" where it was nobody's."""
    if commit.local_drafts is not None:
        return commit.local_drafts.method
    return answer.proposal.method if answer.proposal is not None else ""
