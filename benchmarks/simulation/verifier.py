"""A verifier in simulated time: its engine's and its scheduler's rules, without tensors.

BatchGathering and StepCosts are the real ones. Not simulated: KV memory (no preemption), session limits. Not here: the
drafter (drafter.py) and the sessions (session.py), of which this says what services know.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from benchmarks.simulation.costs import Costs, Table
from benchmarks.simulation.events import Events, Machine
from benchmarks.simulation.rounds import RoundTimes
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.gathering import BatchGathering, LastRound
from outrider.verifier_service.timing.step_costs import StepCosts

LIMITS = VerifierConfig()


@dataclass(eq=False, slots=True, kw_only=True)
class SimulatedSession(ABC):
    """A session as the services know it; `step` .. `return_s` carry the names that BatchGathering reads."""

    opened_at: float = 0.0
    step: object | None = None
    step_arrived_at: float = 0.0
    replied_at: float | None = None
    return_s: float | None = None
    away_s: float = 0.0
    # Rows that the verifier and the drafter still have to compute.
    num_pending: int = 0
    num_behind: int = 0
    # Of the step in progress: draft tokens, and the tokens that a free run may still commit.
    num_draft_tokens: int = 0
    free_run_left: int = 0
    num_asked: int = 0
    asked_at: float = 0.0

    @property
    @abstractmethod
    def num_wanted_rows(self) -> int: ...

    @abstractmethod
    def accept(self) -> int:
        """Decides the draft; returns the number of tokens that are committed, the target's own included."""

    @abstractmethod
    def is_finished(self) -> bool: ...

    @abstractmethod
    def committed(self, num_tokens: int, times: RoundTimes, *, more: bool) -> None: ...

    @abstractmethod
    def proposed(self, total_s: float) -> None:
        """total_s: since the drafter was asked."""


class OwnDrafts(Protocol):
    """Contract: what is drafted for the verifier's sessions: `draft` comes before each forward, `end_round` when all of
    it is committed. waited_s: for drafters, in that round.
    """

    @property
    def waited_s(self) -> float: ...

    def draft(self, sessions: Iterable[Any]) -> float:
        """Sets drafts of sessions; returns seconds (0: nothing is drafted)."""
        ...

    def end_round(self, last_round: LastRound, num_open: int) -> None: ...


@dataclass(slots=True)
class _Work:
    session: SimulatedSession
    num_chain_rows: int
    num_rows: int
    # 0: the forward does not reach the last committed token, so that none can be chosen.
    num_logits_rows: int


@functools.cache
def seconds_by_rows(table: Table) -> Callable[[int], float]:
    """The seconds of a forward by its rows; looked up a hundred thousand times a simulated minute."""
    return functools.cache(StepCosts(table).seconds)


class SimulatedVerifier:
    def __init__(self, events: Events, machine: Machine, costs: Costs, *, one_machine: bool = False) -> None:
        """one_machine: drafter, gateway, client and Redis are on it too."""
        self._events = events
        self._machine = machine
        self._costs = costs
        self._one_machine = one_machine
        self._forward_s = seconds_by_rows(costs.verifier_step)
        self.step_costs = StepCosts(costs.verifier_step)
        self._gathering = BatchGathering(self.step_costs, clock=lambda: events.now)
        # None: it does not draft locally.
        self.own_drafts: OwnDrafts | None = None
        self._draft_s = 0.0
        self._step_began = 0.0
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
        self._gathering.asked(cast(VerifierSession, session), now)
        if not self._is_busy:
            self._consider()

    def _consider(self) -> None:
        """Does what the engine's thread does after its commands: waits for more, or works."""
        self._wake += 1
        patience_s = self._gathering.patience_s(cast(Iterable[VerifierSession], self.sessions))
        if patience_s > 0.0:
            self._events.after(patience_s, self._wake_up, self._wake)
        else:
            self._start()

    def _wake_up(self, wake: int) -> None:
        if wake == self._wake and not self._is_busy:
            self._start()

    def _start(self) -> None:
        self._step_began = self._events.now
        if self.own_drafts is not None:
            self._draft_s = self.own_drafts.draft(self.sessions)
            if self._draft_s > 0.0:
                self._is_busy = True
                self.busy_s += self._draft_s
                self._machine.run(self._draft_s, self._forward)
                return
        self._forward()

    def _forward(self) -> None:
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
        # Who asks while drafts are made waits for the next forward.
        began = self._step_began
        waiting = [s for s in self.sessions if s.step is not None and s.step_arrived_at <= began]
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
        num_open = len(self.sessions)
        times = RoundTimes(
            batch_sessions=len(self._plan),
            open_sessions=num_open,
            draft_s=self._draft_s,
            forward_s=ended - self._started,
            num_rows=sum(work.num_rows for work in self._plan),
        )
        num_tokens = 0
        for work in self._plan:
            if work.num_logits_rows:
                num_tokens += self._commit(work, times, ended)
            else:
                work.session.num_pending -= work.num_chain_rows
        plan = cast(Sequence[Work], self._plan)
        waited_s = self.own_drafts.waited_s if self.own_drafts is not None else 0.0
        self._gathering.observe(
            plan, num_tokens, self._started, ended, num_open=num_open, draft_s=self._draft_s + waited_s
        )
        if self.own_drafts is not None:
            self.own_drafts.end_round(self._gathering.last_round, num_open)
        self._is_busy = False
        if any(session.step is not None for session in self.sessions):
            self._consider()

    def _commit(self, work: _Work, times: RoundTimes, ended: float) -> int:
        """Commits for one session; returns its tokens."""
        now, session = self._events.now, work.session
        session.num_pending = 1
        num_committed = session.accept()
        session.free_run_left -= num_committed
        is_finished = session.is_finished()
        more = session.free_run_left > 0 and not is_finished
        if more:
            session.step_arrived_at = ended
        else:
            session.step = None
            if is_finished:
                del self.sessions[session]
            else:
                self._gathering.replied(cast(VerifierSession, session), now)
        if self._one_machine:
            has_draft = work.num_rows > work.num_chain_rows
            host_s = self._costs.host_round_s + (self._costs.host_draft_s if has_draft else 0.0)
            self._machine.run(host_s, _nothing)
        session.committed(num_committed, times, more=more)
        return num_committed


def _nothing() -> None:
    """Work of gateway, client and Redis overlaps with the rounds, and only takes its share of the cores."""
