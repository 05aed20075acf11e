"""`auto` decided at the verifier, in simulated time: the real DraftLength, told what the engine tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from benchmarks.simulation.rounds import Drafted, SessionRound
from outrider.drafting.session import LONG_REPORT
from outrider.shared.draft_policy.draft_methods import ONE_PASS
from outrider.verifier_service.draft_length.choice import PLAIN, DraftLength, RoundSample
from outrider.verifier_service.draft_length.choice import Drafted as DraftSample
from outrider.verifier_service.timing.gathering import LastRound
from outrider.verifier_service.timing.step_costs import StepCosts

# The one that its costs were recorded of.
DRAFT_METHOD = "draft_model"


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
        members = list(sessions)
        for session in members:
            session.method, session.num_wanted = PLAIN
        for session in self._policy.that_draft(members, lambda session: session.num_unread(choice.method)):
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


class AskingSession(Protocol):
    """A session that asks a drafter for what its commits say.

    num_wanted, patience_s: its next draft, and how long that is worth waiting for. away_s: from its last commit to its
    step; drafter_s: of that, the drafter's own. is_catch_up: the drafter first had much to read.
    """

    step: object | None
    free_run_left: int
    num_wanted: int
    patience_s: float
    away_s: float
    drafter_s: float
    is_catch_up: bool

    @property
    def runs_to_end(self) -> bool: ...


class DrafterLengths:
    """OwnDrafts of a verifier whose sessions ask a drafter: verifier_service/auto_drafting.py for one method.

    A session's commit tells it what to ask for next; where nothing is wanted its run goes on, until something is.
    """

    def __init__(self, costs: StepCosts, max_draft_tokens: int) -> None:
        self._policy = DraftLength(costs.mean_drafts_s, ONE_PASS)
        self._limits = {DRAFT_METHOD: max_draft_tokens}
        self._members: list[tuple[AskingSession, SessionRound]] = []
        self._asked: set[int] = set()  # ids of the sessions that draft for the next round

    @property
    def waited_s(self) -> float:
        waits_s = [session.away_s for session, member in self._members if member.num_asked]
        return sum(waits_s) / len(waits_s) if waits_s else 0.0

    def draft(self, sessions: Iterable[AskingSession]) -> float:
        """Decides; drafts come from elsewhere."""
        choice = self._policy.decide(self._limits)
        present = [session for session in sessions if session.step is not None]
        asked = self._policy.that_draft(present, lambda session: session.num_wanted == 0)
        self._asked = {id(session) for session in asked} if choice.method else set()
        for session in asked:
            if choice.method and session.runs_to_end:
                session.free_run_left = 1
        return 0.0

    def committed(self, session: AskingSession, member: SessionRound) -> None:
        self._members.append((session, member))
        if not member.more:
            session.num_wanted = self._policy.now.num_draft_tokens if id(session) in self._asked else 0
            session.patience_s = self._policy.patience_s

    def end_round(self, last_round: LastRound, num_open: int) -> None:
        members = [(session, member) for session, member in self._members if member.base_len]
        drafts = [
            DraftSample(DRAFT_METHOD, member.num_asked, member.num_proposed, member.num_committed - 1)
            for _, member in members
            if member.num_asked
        ]
        is_catch_up = any(session.is_catch_up for session, member in members if member.num_asked)
        travels_s = [max(0.0, session.away_s - session.drafter_s) for session, member in members if member.num_asked]
        travel_s = sum(travels_s) / len(travels_s) if travels_s else 0.0
        if members:
            num_sessions = members[0][1].times.batch_sessions
            self._policy.observe(
                RoundSample(
                    num_sessions, num_open, *last_round, drafts, self.waited_s, travel_s, is_catch_up=is_catch_up
                )
            )
        self._members = []
