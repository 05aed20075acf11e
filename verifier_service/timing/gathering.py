"""Batch gathering: how long a forward waits for sessions that are about to send their next step.

A drafting session sends its next step a few milliseconds after its commit. A forward that starts without it reads the
weights for fewer sessions, and that session needs another forward. So a forward waits while that raises the sessions
served per second, waiting time included: long while few sessions are ready and rows are cheap, hardly at all when the
batch is full.

Also here: what each forward shows of the verifier's rate (ServedRounds, LastRound).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.context_costs import NO_CONTEXTS, Contexts
from outrider.verifier_service.timing.served_rounds import Served, ServedRounds
from outrider.verifier_service.timing.step_costs import StepCosts

# ratio and s; a session is late beyond its usual return time times the first plus the second; b7efff9
_SLACK, _SLACK_S = 1.3, 0.0005
# weight of the newest return time in a session's mean, about 5 rounds; b7efff9
_RETURN_WEIGHT = 0.2
# forwards; a longer time from one forward's end to the next was idleness, not a round; b7efff9
_MAX_ROUND_FORWARDS = 4.0
# share of a forward; largest share of prompts in a round that counts for the rate: their time is an estimate; fde2b68
_MAX_PROMPT_SHARE = 0.5


class LastRound(NamedTuple):
    """Tokens that a forward committed, and seconds from the end of the forward before it to its own end."""

    num_tokens: int
    seconds: float


NO_ROUND = LastRound(0, 0.0)


class BatchGathering:
    """Chooses the wait before the next forward. Belongs to the engine's thread. Times: seconds of `clock`."""

    def __init__(self, costs: StepCosts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._costs = costs
        self._clock = clock
        self._last_ended = 0.0
        # The newest forward's round; NO_ROUND after a prefill or a pause, which say nothing about the rate.
        self.last_round = NO_ROUND
        self.served = ServedRounds(costs)

    def observe(
        self,
        plan: Sequence[Work],
        num_tokens: int,
        started: float,
        ended: float,
        contexts: Contexts = NO_CONTEXTS,
        *,
        num_open: int = 0,
        draft_s: float = 0.0,
    ) -> None:
        """Learns from a forward. num_tokens: committed by it. contexts: before it. num_open: open sessions.
        draft_s: of making, or waiting for, its drafts.

        Subtracted are the first tokens of prompts, and the time that prompts would take in a forward without drafts.
        With drafts they may cost more, as rows come in steps: drafting pays for that. Leaving such rounds out would
        favour drafting: its sessions end sooner, and so bring the next prompt sooner (fde2b68).
        """
        num_rows = sum(work.num_rows for work in plan)
        self.last_round = NO_ROUND
        prompts = [work for work in plan if work.num_chain_rows > 1]
        num_decoding = len(plan) - len(prompts)
        prompt_rows = sum(work.num_rows for work in prompts)
        prompts_s = self.prompts_s(num_decoding, prompt_rows)
        if num_decoding and prompts_s <= _MAX_PROMPT_SHARE * (ended - started):
            # Without the condition one long prompt would outweigh hundreds of forwards in the cost model.
            self._costs.observe(num_rows, ended - started, contexts, num_sessions=len(plan))
            longest = _MAX_ROUND_FORWARDS * (ended - started) + draft_s
            seconds = (ended - self._last_ended if self._last_ended else ended - started) - prompts_s
            num_tokens -= sum(work.num_logits_rows > 0 for work in prompts)
            if self._last_ended and seconds < longest:
                self.last_round = LastRound(num_tokens, seconds)
            num_open = max(num_open, len(plan))
            served = Served(num_open, num_decoding, num_rows - prompt_rows, min(seconds, longest))
            self.served.observe(served)
        self._last_ended = ended

    def prompts_s(self, num_decoding: int, prompt_rows: int) -> float:
        """Seconds that reading prompts adds to a forward of num_decoding sessions without drafts."""
        if not prompt_rows:
            return 0.0
        return self._costs.seconds(num_decoding + prompt_rows) - self._costs.seconds(num_decoding)

    def replied(self, session: VerifierSession, now: float) -> None:
        """Records that the session has been sent its commit and will send a next step."""
        session.replied_at = now

    def asked(self, session: VerifierSession, now: float) -> None:
        """Records that the session's next step has arrived."""
        if session.replied_at is not None:
            took = now - session.replied_at
            known = session.return_s
            session.away_s = took
            session.return_s = took if known is None else known + _RETURN_WEIGHT * (took - known)
            session.replied_at = None

    def patience_s(self, sessions: Iterable[VerifierSession]) -> float:
        """Seconds that the next forward should wait for further steps; 0: it should start now."""
        now = self._clock()
        num_here, num_rows, waits_s = 0, 0, []
        for session in sessions:
            if session.step is not None:
                num_here += 1
                num_rows += session.num_wanted_rows
            elif session.replied_at is not None and session.return_s is not None:
                wait_s = session.replied_at + _SLACK * session.return_s + _SLACK_S - now
                if wait_s > 0.0:
                    waits_s.append(wait_s)
        return self._best_wait_s(num_here, num_rows, sorted(waits_s)) if num_here else 0.0

    def _best_wait_s(self, num_here: int, num_rows: int, waits_s: Sequence[float]) -> float:
        """The wait that serves most sessions per second. waits_s: until each session away is expected, ascending."""
        rows_each = self.served.rows_each
        forward_s = self._costs.seconds(num_rows)
        best_s, best_rate = 0.0, num_here / forward_s
        for num_back, wait_s in enumerate(waits_s, 1):
            if wait_s >= forward_s:
                break  # a forward without them ends before they arrive
            rate = (num_here + num_back) / (wait_s + self._costs.seconds(round(num_rows + num_back * rows_each)))
            if rate > best_rate:
                best_s, best_rate = wait_s, rate
        return best_s
