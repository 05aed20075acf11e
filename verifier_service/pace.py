"""Whom a forward should still wait for, and what the last one tells of the rate.

Sessions that draft come back with a proposal some milliseconds after their commit. A forward that starts without them
reads the weights for few, and they wait for one of their own. So a forward waits as long as that raises the sessions it
serves per second, its own time and the waiting counted: long where few wait and rows cost little, hardly at all where a
forward is full (16 sessions of 3 rows on two cores: 69 ms, two halves of them 37 ms each).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shared.loads import load_of
from shared.two_ways import TwoWays
from verifier_service.context_costs import NO_CONTEXTS, Contexts
from verifier_service.scheduler import Work
from verifier_service.served_rates import Served, ServedRates
from verifier_service.session import VerifierSession
from verifier_service.step_costs import StepCosts

# A session counts as late after this much more than its usual time.
_SLACK = 1.3
_SLACK_S = 0.0005
_RETURN_WEIGHT = 0.2
# A longer pause between two forwards was idleness, not a round.
_LONGEST_ROUND_FORWARDS = 4.0
# A round of which prompts took more tells nothing of the rate: what they took is only estimated.
_MOST_OF_PROMPTS = 0.5
# Who gathers waits no longer than so many forwards.
_LONGEST_GATHERING_FORWARDS = 2.0
# Rounds of each session: in a turn of one way, those of them that settle, and in a comparison of the ways.
_TURN_ROUNDS = 8
_SETTLE_ROUNDS = 2
_TRIAL_ROUNDS = 24


class LastRound(NamedTuple):
    """What a forward committed, and the time from its predecessor's end to its own."""

    num_tokens: int
    seconds: float


NO_ROUND = LastRound(0, 0.0)


class Pace:
    """Belongs to the engine's thread. All times are seconds of `clock`."""

    def __init__(self, costs: StepCosts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._costs = costs
        self._clock = clock
        self._last_ended = 0.0
        # Of the newest forward; NO_ROUND after a prefill or a pause, which tell nothing of the rate.
        self.last_round = NO_ROUND
        self.rates = ServedRates(costs)
        # By number of sessions: whether forwards gather all who are about to ask; and what the next one does.
        self._gatherings: dict[int, TwoWays] = {}
        self._gathering: TwoWays | None = None
        self._gathers = False

    def observe(
        self,
        plan: Sequence[Work],
        num_tokens: int,
        started: float,
        ended: float,
        contexts: Contexts = NO_CONTEXTS,
        *,
        num_open: int = 0,
    ) -> None:
        """A forward and what it committed. contexts: of its rows, before it. num_open: sessions, in it or not.

        Of prompts and their first tokens it tells nothing: they are taken off. Rounds with prompts are not left out
        altogether, as the more tokens a round brings, the sooner a session ends and another one's prompt comes: without
        them drafting seemed 7 % ahead of plain decoding where requests of 64 tokens lost 2 % (32 sessions).
        """
        num_rows = sum(work.num_rows for work in plan)
        self.last_round = NO_ROUND
        prompts = [work for work in plan if work.num_chain_rows > 1]
        num_decoding = len(plan) - len(prompts)
        decode_rows = num_rows - sum(work.num_rows for work in prompts)
        prompts_s = self._costs.seconds(num_rows) - self._costs.seconds(decode_rows) if prompts else 0.0
        if num_decoding and prompts_s <= _MOST_OF_PROMPTS * (ended - started):
            # A long prompt would outweigh hundreds of other forwards in what is known of their rows.
            self._costs.observe(num_rows, ended - started, contexts, num_sessions=len(plan))
            longest = _LONGEST_ROUND_FORWARDS * (ended - started)
            seconds = (ended - self._last_ended if self._last_ended else ended - started) - prompts_s
            num_tokens -= sum(work.num_logits_rows > 0 for work in prompts)
            if self._last_ended and seconds < longest:
                self.last_round = LastRound(num_tokens, seconds)
                if self._gathering is not None:
                    self._gathering.observe(seconds / num_decoding, second=self._gathers, count=num_decoding)
            num_open = max(num_open, len(plan))
            self.rates.observe(Served(num_open, num_decoding, decode_rows, num_tokens, min(seconds, longest)))
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
        now = self._clock()
        num_here, num_rows, num_away, waits_s, takes_turns = 0, 0, 0, [], False
        for session in sessions:
            takes_turns |= session.return_s is not None
            if session.step is not None:
                num_here += 1
                num_rows += session.num_wanted_rows
            elif session.replied_at is not None and session.return_s is not None:
                num_away += 1
                wait_s = session.replied_at + _SLACK * session.return_s + _SLACK_S - now
                if wait_s > 0.0:
                    waits_s.append(wait_s)
        num_sessions = num_here + num_away
        self._gathering = self._gathering_of(num_sessions) if takes_turns and num_sessions > 1 else None
        self._gathers = self._gathering is not None and self._gathering.takes_second
        if not num_here:
            return 0.0
        longest_s = _LONGEST_GATHERING_FORWARDS * self._costs.seconds(num_rows)
        if self._gathers:
            return max((wait_s for wait_s in waits_s if wait_s < longest_s), default=0.0)
        return self._best_wait_s(num_here, num_rows, sorted(waits_s))

    def _gathering_of(self, num_sessions: int) -> TwoWays:
        place = load_of(num_sessions)
        if place not in self._gatherings:
            self._gatherings[place] = TwoWays(
                _TURN_ROUNDS * num_sessions, _TRIAL_ROUNDS * num_sessions, _SETTLE_ROUNDS * num_sessions
            )
        return self._gatherings[place]

    def _best_wait_s(self, num_here: int, num_rows: int, waits_s: Sequence[float]) -> float:
        """waits_s: until each of those away is back, ascending."""
        rows_each = self.rates.rows_each
        forward_s = self._costs.seconds(num_rows)
        best_s, best_rate = 0.0, num_here / forward_s
        for num_back, wait_s in enumerate(waits_s, 1):
            if wait_s >= forward_s:
                break  # those who are here are served before they are back
            rate = (num_here + num_back) / (wait_s + self._costs.seconds(round(num_rows + num_back * rows_each)))
            if rate > best_rate:
                best_s, best_rate = wait_s, rate
        return best_s
