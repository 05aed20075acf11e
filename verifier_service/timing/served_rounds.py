"""Estimates the length of rounds by the number of open sessions: VerifierInfo.round_us, and rows per session.

Means over past rounds would describe the load before a burst of requests, so only what hardly depends on the load is
smoothed: the share of open sessions in a forward, and rows per session (docs/log.md: bdc3086).
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.verifier_service.timing.step_costs import StepCosts

# weight of the newest forward in the means, about 12 forwards; b7efff9
_WEIGHT = 0.08


class Served(NamedTuple):
    """A forward without its prompts. num_open: open sessions. seconds: since the end of the forward before it."""

    num_open: int
    num_sessions: int
    num_rows: int
    seconds: float


class ServedRounds:
    """Means over the newest forwards, and the rounds they imply at other loads. Belongs to the engine's thread."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # Means over the last forwards.
        self._num_open = self._num_sessions = self._num_rows = 1.0
        self._seconds = costs.seconds(1)

    @property
    def rows_each(self) -> float:
        """Rows per session in a forward."""
        return self._num_rows / self._num_sessions

    def observe(self, served: Served) -> None:
        self._num_open += _WEIGHT * (served.num_open - self._num_open)
        self._num_sessions += _WEIGHT * (served.num_sessions - self._num_sessions)
        self._num_rows += _WEIGHT * (served.num_rows - self._num_rows)
        self._seconds += _WEIGHT * (served.seconds - self._seconds)

    def round_us(self, max_open: int) -> tuple[int, ...]:
        """Microseconds of a round while 1, 2, 4, ... sessions are open, as far as needed to cover max_open."""
        pauses_s = max(0.0, self._seconds - self._costs.seconds(self._num_rows))
        served = [self._num_served(1 << power) for power in range((max_open - 1).bit_length() + 1)]
        forwards_s = [self._costs.seconds_beside(number * self.rows_each, number) for number in served]
        return tuple(round(1e6 * (pauses_s + forward_s)) for forward_s in forwards_s)

    def _num_served(self, num_open: int) -> float:
        """Mean sessions in a forward while num_open are open."""
        return max(1.0, num_open * min(1.0, self._num_sessions / self._num_open))
