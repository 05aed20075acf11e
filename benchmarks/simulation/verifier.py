"""A verifier in simulated time: its engine's and its scheduler's rules, without tensors.

Pace and StepCosts are the real ones. Not simulated: KV memory (no preemption) and limits on sessions. Not here: the
drafter (drafter.py) and the sessions (session.py), of which this says what services know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from benchmarks.simulation.costs import Costs, Table
from benchmarks.simulation.events import Events, Machine
from verifier_service.config import VerifierConfig
from verifier_service.pace import LastRound, Pace
from verifier_service.scheduler import Work
from verifier_service.session import VerifierSession
from verifier_service.step_costs import StepCosts

LIMITS = VerifierConfig()


@dataclass(slots=True)
class RoundTimes:
    """Of one commit: what messages.Timings says, in seconds."""

    total_s: float
    batch_sessions: int
    draft_rows_us: tuple[int, ...]
    tokens_per_s: float
    last_round: LastRound
    open_sessions: int


class SimulatedSession(Protocol):
    """What the services know of a session; `step` .. `return_s` carry the names that Pace reads."""

    opened_at: float
    step: object | None
    step_arrived_at: float
    replied_at: float | None
    return_s: float | None
    # Rows that the verifier and the drafter still have to compute.
    num_pending: int
    num_behind: int
    # Of the step in progress: draft tokens, and the tokens that a free run may still commit.
    num_draft_tokens: int
    free_run_left: int
    num_asked: int
    asked_at: float

    @property
    def num_wanted_rows(self) -> int: ...

    def accept(self) -> int:
        """Decides the draft; returns the number of tokens that are committed, the target's own included."""
        ...

    def is_finished(self) -> bool: ...

    def committed(self, num_tokens: int, times: RoundTimes, *, more: bool) -> None: ...

    def proposed(self, draft_s: float, total_s: float) -> None: ...


@dataclass(slots=True)
class _Work:
    session: SimulatedSession
    num_chain_rows: int
    num_rows: int
    # 0: the forward does not reach the last committed token, so that none can be chosen.
    num_logits_rows: int


@functools.cache
def seconds_by_rows(table: Table) -> Callable[[int], float]:
    """What a forward of so many rows takes; looked up a hundred thousand times a simulated minute."""
    return functools.cache(StepCosts(table).seconds)


class SimulatedVerifier:
    def __init__(self, events: Events, machine: Machine, costs: Costs, *, one_machine: bool = False) -> None:
        """one_machine: drafter, gateway, client and Redis are on it too."""
        self._events = events
        self._machine = machine
        self._costs = costs
        self._one_machine = one_machine
        self._forward_s = seconds_by_rows(costs.verifier_step)
        self._pace = Pace(StepCosts(costs.verifier_step), clock=lambda: events.now)
        self.sessions: dict[SimulatedSession, None] = {}
        self._is_busy = False
        self._wake = 0
        self._plan: list[_Work] = []
        self._started = 0.0
        self.busy_s = 0.0

    def open(self, session: SimulatedSession) -> None:
        self.sessions[session] = None

    def submit(self, session: SimulatedSession) -> None:
        now = self._events.now
        session.step, session.step_arrived_at = True, now
        self._pace.asked(cast(VerifierSession, session), now)
        if not self._is_busy:
            self._consider()

    def _consider(self) -> None:
        """What the engine's thread does when it has run its commands: waits for more, or works."""
        self._wake += 1
        patience_s = self._pace.patience_s(cast(Iterable[VerifierSession], self.sessions))
        if patience_s > 0.0:
            self._events.after(patience_s, self._wake_up, self._wake)
        else:
            self._start()

    def _wake_up(self, wake: int) -> None:
        if wake == self._wake and not self._is_busy:
            self._start()

    def _start(self) -> None:
        self._plan = self._place()
        if not self._plan:
            return
        self._is_busy = True
        self._started = self._events.now
        seconds = self._forward_s(sum(work.num_rows for work in self._plan))
        seconds += (len(self._plan) - 1) * self._costs.verifier_session_s
        if self._one_machine and any(work.num_rows > work.num_chain_rows for work in self._plan):
            seconds *= self._costs.verifier_beside_drafter
        self.busy_s += seconds
        self._machine.run(seconds, self._end)

    def _place(self) -> list[_Work]:
        """The scheduler's order and budget: the oldest, then those that decode, then prefills in chunks."""
        waiting = [session for session in self.sessions if session.step is not None]
        if len(waiting) > 1:
            oldest = min(waiting, key=lambda session: session.opened_at)
            waiting.sort(key=lambda session: (session is not oldest, session.num_pending > 1, session.step_arrived_at))
        budget = LIMITS.max_num_batched_tokens
        plan = []
        for session in waiting:
            if budget <= 0:
                break
            pending = session.num_pending
            chunk = min(pending, LIMITS.prefill_chunk_size, budget)
            drafts = min(session.num_draft_tokens, budget - chunk) if chunk == pending else 0
            session.num_draft_tokens = drafts
            plan.append(_Work(session, chunk, chunk + drafts, (1 + drafts) * (chunk == pending)))
            budget -= chunk + drafts
        return plan

    def _end(self) -> None:
        costs = self._costs
        gap_s = costs.step_gap_s + len(self._plan) * costs.step_gap_per_session_s
        # Decided and sent one after the other, on the engine's thread; a share of the gap is the next plan's.
        self._machine.run(gap_s, lambda ended=self._events.now: self._settle(ended))  # type: ignore[misc]

    def _settle(self, ended: float) -> None:
        now, rates = self._events.now, self._pace.rates
        num_open = len(self.sessions)
        draft_rows_us, tokens_per_s = rates.draft_rows_us(num_open), rates.tokens_per_s(num_open)
        num_tokens = 0
        for work in self._plan:
            session = work.session
            if not work.num_logits_rows:
                session.num_pending -= work.num_chain_rows
                continue
            session.num_pending = 1
            num_committed = session.accept()
            num_tokens += num_committed
            session.free_run_left -= num_committed
            is_finished = session.is_finished()
            more = session.free_run_left > 0 and not is_finished
            times = RoundTimes(
                now - session.step_arrived_at,
                len(self._plan),
                draft_rows_us,
                tokens_per_s,
                self._pace.last_round,
                len(self.sessions),
            )
            if more:
                session.step_arrived_at = ended
            else:
                session.step = None
                if is_finished:
                    del self.sessions[session]
                else:
                    self._pace.replied(cast(VerifierSession, session), now)
            if self._one_machine:
                has_draft = work.num_rows > work.num_chain_rows
                host_s = self._costs.host_round_s + (self._costs.host_draft_s if has_draft else 0.0)
                self._machine.run(host_s, _nothing)
            session.committed(num_committed, times, more=more)
        plan = cast(Sequence[Work], self._plan)
        self._pace.observe(plan, num_tokens, self._started, ended, num_open=num_open)
        self._is_busy = False
        if any(session.step is not None for session in self.sessions):
            self._consider()


def _nothing() -> None:
    """What gateway, client and Redis do goes on beside the rounds, and only takes its part of the cores."""
