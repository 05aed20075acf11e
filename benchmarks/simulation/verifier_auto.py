"""`auto` decided at the verifier, in simulated time: the real DraftLength, told what the engine tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.simulation.rounds import Drafted, SessionRound
from outrider.drafting.session import LONG_REPORT
from outrider.shared.draft_policy.draft_methods import ONE_PASS
from outrider.verifier_service.draft_length.choice import Drafted as DraftSample
from outrider.verifier_service.draft_length.choice import DraftLength, RoundSample
from outrider.verifier_service.timing.gathering import LastRound
from outrider.verifier_service.timing.step_costs import StepCosts


class VerifierLengths:
    """DraftLengths of one verifier. limits: its methods, with the most tokens of each."""

    def __init__(self, costs: StepCosts, limits: Mapping[str, int]) -> None:
        self._policy = DraftLength(costs.mean_drafts_s, ONE_PASS)
        self._limits = limits
        self._is_catch_up = False

    def opened(self, session: Drafted) -> None:
        session.method, session.num_wanted = self._policy.now

    def decide(self, sessions: Iterable[Drafted]) -> None:
        choice = self._policy.decide(self._limits)
        self._is_catch_up = False
        for session in sessions:
            session.method, session.num_wanted = choice
            if choice.method:
                self._is_catch_up |= session.num_unread(choice.method) > LONG_REPORT

    def observe(self, members: Sequence[SessionRound], last_round: LastRound, num_open: int) -> None:
        drafts = [
            DraftSample(member.method, member.num_asked, member.num_proposed, member.num_committed - 1)
            for member in members
            if member.num_asked
        ]
        times = members[0].times
        sample = RoundSample(
            times.batch_sessions, num_open, *last_round, drafts, times.draft_s, is_catch_up=self._is_catch_up
        )
        self._policy.observe(sample)
