"""`auto` for the engine's sessions: passes the policy's choice on to each session, and each round on to the policy.

Not here: the choice itself (draft_length), and making the drafts (local_drafting).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from outrider.drafting.session import LONG_REPORT
from outrider.shared.draft_policy.draft_methods import DRAFT_METHODS, ONE_PASS, PREDICTION, with_lookup
from outrider.shared.messages import AutoDrafts, Commit, DraftMethodInfo, LocalDrafts, NextDraft
from outrider.verifier_service.draft_length.choice import Drafted, DraftLength, RoundSample
from outrider.verifier_service.draft_length.predicted_drafts import PredictedDrafts
from outrider.verifier_service.draft_length.prediction import CostsOfPredictions
from outrider.verifier_service.session import LocalDraft, VerifierSession
from outrider.verifier_service.timing.gathering import LastRound
from outrider.verifier_service.timing.step_costs import StepCosts


class AutoDrafting:
    """Decides for sessions with `auto` what drafts their next rounds. Belongs to the engine's thread.

    methods: of local drafting, by name. A round is `decide`, then `committed` for each session that gets tokens, then
    `observe`.
    """

    def __init__(self, costs: StepCosts, methods: Mapping[str, DraftMethodInfo], max_model_len: int) -> None:
        self._methods = methods
        self._max_model_len = max_model_len
        self._policy = DraftLength(costs.mean_drafts_s, ONE_PASS)
        self._predicted_costs = CostsOfPredictions(costs.seconds, costs.mean_drafts_s)
        # The round in progress: its drafts, and the sessions' waits for drafters and travel times.
        self._drafts: list[Drafted] = []
        self._waits_s: list[float] = []
        self._travels_s: list[float] = []
        self._is_catch_up = self._is_asked = self._has_auto = False
        # Of the round in progress: drafts from predictions, the tokens they brought, and the seconds they added.
        self._num_predicted = self._predicted_tokens = 0
        self._predicted_s = 0.0

    @property
    def plain_round_s(self) -> float:
        """Seconds of a round without drafts at the load of the newest one; 0: not known yet."""
        return self._policy.plain_round_s

    @property
    def waited_s(self) -> float:
        """Mean time that the sessions of the round in progress have waited for their drafters."""
        return fmean(self._waits_s) if self._waits_s else 0.0

    def decide(self, sessions: Collection[VerifierSession]) -> None:
        """Sets for each session with `auto` what its next round drafts with; a drafter's draft ends its run."""
        self._drafts, self._waits_s, self._travels_s, self._is_catch_up = [], [], [], False
        self._num_predicted, self._predicted_tokens, self._predicted_s = 0, 0, 0.0
        autos = [(session, session.auto) for session in sessions if session.step is not None and session.auto]
        self._has_auto = bool(autos)
        self._is_asked = self._has_auto or any(session.local_drafts is not None for session in sessions)
        if not autos:
            return
        limits: dict[str, int] = {}
        for auto in {auto for _, auto in autos}:
            for name, most in self._limits(auto).items():
                limits[name] = max(most, limits.get(name, 0))
        rounds_s = [1e-6 * auto.max_round_us for _, auto in autos if auto.max_round_us]
        self._policy.max_round_s = min(rounds_s, default=math.inf)
        method, _ = self._policy.decide({name: limits[name] for name in sorted(limits, key=_best_guess_first)})
        for session, _ in autos:
            session.auto_choice = None
        drafting = self._policy.that_draft(autos, lambda asked: asked[0].unread_by(method))
        for session, auto in drafting:
            session.auto_choice = self._for_session(auto)
        if predicting := [(session, auto) for session, auto in autos if session.can_draft_from_prediction]:
            num_decoding = sum(session.step is not None and session.num_pending == 1 for session in sessions)
            self._draft_from_predictions(predicting, num_decoding)
        for session, _ in autos:
            if session.auto_choice is None or session.auto_choice.method == PREDICTION:
                continue
            if method not in self._methods and session.runs_to_end:
                session.free_run_left = 1
            if method in self._methods:
                self._is_catch_up |= session.unread_by(method) > LONG_REPORT

    def next_draft(self, session: VerifierSession) -> NextDraft | None:
        """Returns what a drafter is to draft for the session's next round; None: nothing."""
        choice = session.auto_choice
        if choice is None or choice.method == PREDICTION or choice.method in self._methods:
            return None
        return NextDraft(choice.method, choice.num_draft_tokens, round(1e6 * self._policy.patience_s))

    def committed(self, session: VerifierSession, commit: Commit) -> None:
        """Records one session's part in the round; called before its step is over."""
        asked, step = session.local_draft, session.step
        if asked is not None and asked.asked.method == PREDICTION and session.predicted is not None:
            self._num_predicted += 1
            self._predicted_tokens += commit.num_accepted_tokens
            self._predicted_s += session.predicted.observe(commit)
        elif asked is not None:
            self._add(session, asked.asked.method, asked.asked.num_draft_tokens, commit)
        elif step is not None and step.proposal is not None:
            self._waited(session, step.proposal.method)
            self._add(session, step.proposal.method, len(step.proposal.token_ids), commit)
        elif _was_drafted_for(session, commit) and session.wanted is not None:
            self._waited(session, session.wanted.method)
            self._add(session, session.wanted.method, session.wanted.num_draft_tokens, commit)
        session.wanted = commit.next_draft

    def observe(self, num_sessions: int, num_open: int, last_round: LastRound, draft_s: float) -> None:
        """Passes the finished round on to the policy, without the drafts from predictions in it.

        num_sessions: those that decoded. draft_s: of local drafting.
        """
        if not self._is_asked and not self._drafts:
            self._policy.observe_plain(num_open, last_round.num_tokens, last_round.seconds)
            return
        if 2 * self._num_predicted > num_sessions:
            return  # what is left of the round is mostly the cost model's error
        self._policy.observe(
            RoundSample(
                num_sessions,
                num_open,
                last_round.num_tokens - self._predicted_tokens,
                last_round.seconds - self._predicted_s,
                self._drafts,
                draft_s + self.waited_s,
                fmean(self._travels_s) if self._travels_s else 0.0,
                is_catch_up=self._is_catch_up,
                is_own=self._has_auto,
            )
        )

    def _draft_from_predictions(self, members: Sequence[tuple[VerifierSession, AutoDrafts]], num_decoding: int) -> None:
        """Drafts for the sessions whose prediction pays in the next round; the others keep the policy's choice."""
        policy = self._policy
        for session, auto in members:
            if session.local_draft is not None:  # made for a forward that had no room for it
                session.auto_choice = session.local_draft.asked
                continue
            if session.predicted is None:
                session.predicted = PredictedDrafts.of(session.spec.predicted_token_ids, session.processor.grammar)
            most = min(auto.max_num_draft_tokens, session.draft_room(self._max_model_len))
            started = time.perf_counter()
            costs = self._predicted_costs.of(num_decoding, len(members), policy.plain_round_s, policy.max_round_s)
            proposal = session.predicted.propose(session.output_token_ids, most, costs)
            if proposal is not None:
                session.auto_choice = LocalDrafts(PREDICTION, len(proposal.token_ids))
                session.local_draft = LocalDraft(session.auto_choice, proposal, time.perf_counter() - started)

    def _add(self, session: VerifierSession, method: str, num_asked: int, commit: Commit) -> None:
        if method not in DRAFT_METHODS and method not in self._methods:
            return  # nothing is kept of names that a peer makes up
        num_proposed, num_accepted = commit.num_draft_tokens, commit.num_accepted_tokens
        self._drafts.append(Drafted(method, max(num_asked, num_proposed), num_proposed, num_accepted))
        session.read_len[method] = commit.end

    def _waited(self, session: VerifierSession, method: str) -> None:
        last = session.step.last_draft if session.step is not None else None
        drafter_s = 1e-6 * last.drafter_us if last is not None else session.away_s
        self._waits_s.append(session.away_s)
        self._travels_s.append(max(0.0, session.away_s - drafter_s))
        self._is_catch_up |= session.unread_by(method) > LONG_REPORT

    def _for_session(self, auto: AutoDrafts) -> LocalDrafts | None:
        """The policy's choice within what the session may draft."""
        method, length = self._policy.now
        most = self._limits(auto).get(method, 0)
        if not most:
            return None
        info = self._methods.get(method)
        has_trees = auto.token_tree and (info is None or info.proposes_trees)
        return LocalDrafts(method, min(length, most), has_trees)

    def _limits(self, auto: AutoDrafts) -> Mapping[str, int]:
        """Maps each available method to the most tokens that it may draft.

        Without those that are there together with a lookup, and without `ngram` beside `suffix`: what it finds, the
        suffixes find too, and each method to try costs looks.
        """
        limits = {offer.method: offer.max_num_draft_tokens for offer in auto.drafters if offer.method in DRAFT_METHODS}
        limits.update({name: info.limit(token_tree=auto.token_tree) for name, info in self._methods.items()})
        most = auto.max_num_draft_tokens
        covered = {name for name in limits if with_lookup(name) in limits} | (
            {"ngram"} if "suffix" in limits else set()
        )
        return {name: min(limit or most, most) for name, limit in limits.items() if name not in covered}


def _best_guess_first(method: str) -> int:
    return DRAFT_METHODS.index(method) if method in DRAFT_METHODS else len(DRAFT_METHODS)


def _was_drafted_for(session: VerifierSession, commit: Commit) -> bool:
    """Returns whether a drafter was asked for this round, whatever came of it."""
    step = session.step
    is_first = step is not None and commit.base_len == step.base_len
    return is_first and step is not None and step.last_draft is not None and not step.last_draft.refused
