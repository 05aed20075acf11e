"""How fast tokens come, what a row costs in tokens, and whom a forward should still wait for.

Sessions that draft come back with a proposal some milliseconds after their commit. A forward that starts without them
makes them wait for a whole one of their own, and the weights are read twice: with a return time D and a fixed cost of
a forward A, two halves that take turns need 2 A for what one batch does in D + A. So it pays to wait for those who
will be back within A.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from verifier_service.scheduler import Work
from verifier_service.session import VerifierSession
from verifier_service.step_costs import StepCosts

# Share of a forward's fixed cost that waiting may take; the rest is the gain.
_WORTH = 0.7
# A session counts as late after this much more than its usual time.
_SLACK = 1.3
_SLACK_S = 0.0005
_RETURN_WEIGHT = 0.2
_GOODPUT_WEIGHT = 0.08
# A longer pause between two forwards was idleness, not a round.
_LONGEST_ROUND_FORWARDS = 4.0
# Rows of a session that drafts a few tokens.
_TYPICAL_ROWS = 4


class Pace:
    """Belongs to the engine's thread. Times are perf_counter seconds."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._last_ended = 0.0
        self._tokens_per_forward = 1.0
        self._seconds_per_forward = costs.seconds(1)
        self._rows_per_forward = 1.0
        self._sessions_per_forward = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens committed per second of work, the pauses between forwards included."""
        return self._tokens_per_forward / self._seconds_per_forward

    @property
    def marginal_row_s(self) -> float:
        """Seconds that a draft row adds to a forward: the mean over the rows that drafts would take.

        Not the slope where the forwards are now: at a kink of the table that would swing with every choice it leads to.
        """
        num_plain = max(1, round(self._sessions_per_forward))
        num_drafted = max(round(self._rows_per_forward), _TYPICAL_ROWS * num_plain)
        return (self._costs.seconds(num_drafted) - self._costs.seconds(num_plain)) / (num_drafted - num_plain)

    def observe(self, plan: Sequence[Work], num_tokens: int, started: float, ended: float) -> None:
        """A forward and what it committed. Prefills tell nothing about rounds."""
        num_rows = sum(work.num_rows for work in plan)
        self._costs.observe(num_rows, ended - started)
        if all(work.samples for work in plan):
            longest = _LONGEST_ROUND_FORWARDS * (ended - started)
            seconds = min(ended - self._last_ended, longest) if self._last_ended else ended - started
            self._tokens_per_forward += _GOODPUT_WEIGHT * (num_tokens - self._tokens_per_forward)
            self._seconds_per_forward += _GOODPUT_WEIGHT * (seconds - self._seconds_per_forward)
            self._rows_per_forward += _GOODPUT_WEIGHT * (num_rows - self._rows_per_forward)
            self._sessions_per_forward += _GOODPUT_WEIGHT * (len(plan) - self._sessions_per_forward)
        self._last_ended = ended

    def replied(self, session: VerifierSession, now: float) -> None:
        """The session has its commit and will ask again."""
        session.replied_at = now

    def asked(self, session: VerifierSession, now: float) -> None:
        """The session has asked for its next step."""
        if session.replied_at is not None:
            took = now - session.replied_at
            known = session.return_s
            session.return_s = took if known is None else known + _RETURN_WEIGHT * (took - known)
            session.replied_at = None

    def patience_s(self, sessions: Iterable[VerifierSession]) -> float:
        """Seconds that the next forward should wait for sessions that are about to ask; 0: for none."""
        now = time.perf_counter()
        horizon = self._last_ended + _WORTH * self._costs.seconds(1)
        is_anybody_there = False
        wait_until = now
        for session in sessions:
            if session.step is not None:
                is_anybody_there = True
            elif session.replied_at is not None and session.return_s is not None:
                at_latest = session.replied_at + _SLACK * session.return_s + _SLACK_S
                if now < at_latest <= horizon:
                    wait_until = max(wait_until, at_latest)
        return wait_until - now if is_anybody_there else 0.0
