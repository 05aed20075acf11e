"""A drafter in simulated time: its engine's rules, without tensors.

Not simulated: limits on sessions, and prompts that its cache has seen before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.events import Events, Machine
from benchmarks.simulation.verifier import LIMITS, SimulatedSession, seconds_by_rows
from outrider.drafter_service.engine import _LONGEST_PATIENCE_S, _PATIENCE_SHARE
from outrider.drafting.methods.draft_model import CATCH_UP_ROWS


class SimulatedDrafter:
    def __init__(self, events: Events, machine: Machine, costs: Costs, *, one_machine: bool = False) -> None:
        """one_machine: the verifier is on it too."""
        self._events = events
        self._machine = machine
        self._step_s = seconds_by_rows(costs.draft_step)
        self._fixed_s = costs.draft_fixed_s
        self._slowdown = costs.drafter_beside_verifier if one_machine else 1.0
        self._asked: list[SimulatedSession] = []
        self._behind: deque[SimulatedSession] = deque()
        self._expected: set[SimulatedSession] = set()
        self._first_asked_at: float | None = None
        self._propose_s = 0.0
        self._is_busy = False
        self._wake = 0
        self.busy_s = 0.0

    def open(self, session: SimulatedSession) -> None:
        self._behind.append(session)
        self._consider()

    def submit(self, session: SimulatedSession) -> None:
        session.asked_at = self._events.now
        if self._first_asked_at is None:
            self._first_asked_at = session.asked_at
        self._expected.discard(session)
        self._asked.append(session)
        self._consider()

    def close(self, session: SimulatedSession) -> None:
        self._expected.discard(session)
        self._asked = [other for other in self._asked if other is not session]
        if session in self._behind:
            self._behind.remove(session)

    def _consider(self) -> None:
        if self._is_busy or not (self._asked or self._behind):
            return
        self._wake += 1
        patience_s = 0.0
        if self._expected and self._asked and self._first_asked_at is not None:
            worth_s = min(_LONGEST_PATIENCE_S, _PATIENCE_SHARE * self._propose_s)
            patience_s = self._first_asked_at + worth_s - self._events.now
        if patience_s > 0.0:
            self._events.after(patience_s, self._wake_up, self._wake)
        else:
            self._work()

    def _wake_up(self, wake: int) -> None:
        if wake == self._wake and not self._is_busy:
            self._work()

    def _work(self) -> None:
        """One piece of somebody's prompt, then a proposal for all who have asked and are not behind."""
        catch_up_s = self._catch_up()
        batch = [session for session in self._asked if session not in self._behind]
        self._asked = [session for session in self._asked if session in self._behind]
        if batch:
            self._first_asked_at = None
        propose_s = self._propose_seconds(batch) if batch else 0.0
        if catch_up_s + propose_s == 0.0:
            self._consider()
            return
        self._is_busy = True
        self.busy_s += catch_up_s + propose_s
        started = self._events.now
        if catch_up_s:
            self._machine.run(catch_up_s, lambda: self._propose(batch, propose_s, self._events.now))
        else:
            self._propose(batch, propose_s, started)

    def _catch_up(self) -> float:
        if not self._behind:
            return 0.0
        session = self._behind.popleft()
        if session.num_behind <= CATCH_UP_ROWS:
            return 0.0
        chunk = min(session.num_behind, LIMITS.prefill_chunk_size)
        session.num_behind -= chunk
        if session.num_behind > CATCH_UP_ROWS:
            self._behind.append(session)
        return self._step_s(chunk)

    def _propose_seconds(self, batch: Sequence[SimulatedSession]) -> float:
        """A forward per depth over those who still draft; the first computes what was committed meanwhile."""
        seconds = self._fixed_s + self._step_s(sum(max(1, session.num_behind) for session in batch))
        for depth in range(1, max(session.num_asked for session in batch)):
            seconds += self._step_s(sum(session.num_asked > depth for session in batch))
        return self._slowdown * seconds

    def _propose(self, batch: list[SimulatedSession], propose_s: float, started: float) -> None:
        self._machine.run(propose_s, lambda: self._reply(batch, started))

    def _reply(self, batch: list[SimulatedSession], started: float) -> None:
        self._is_busy = False
        if batch:
            self._propose_s = self._events.now - started
            self._expected = set(batch)
        for session in batch:
            session.num_behind = 0
            session.proposed(self._events.now - session.asked_at)
        self._consider()
