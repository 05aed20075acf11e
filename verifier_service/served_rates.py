"""What a verifier tells of its work: the rate at which tokens come, and what draft tokens would add to a forward.

Both are of the number of sessions that there is now. A mean over the last rounds is of those that there were: of
sixteen requests that came together each was told the prices of the two before them, and drafted five tokens where two
or three pay, for the first 6 to 9 of its 35 rounds. So what is smoothed does not follow the load by itself: the share
of the open sessions that a forward serves, and the tokens and rows that each of them has in it.
"""

from __future__ import annotations

from typing import NamedTuple

from verifier_service.step_costs import StepCosts

_WEIGHT = 0.08
# Draft lengths whose price is told.
_TOLD_LENGTHS = 8


class Served(NamedTuple):
    """A forward, without the prompts in it. seconds: since its predecessor's end."""

    num_open: int
    num_sessions: int
    num_rows: int
    num_tokens: int
    seconds: float


class ServedRates:
    """Belongs to the engine's thread."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # Means over the last forwards.
        self._num_open = self._num_sessions = self._num_rows = self._num_tokens = 1.0
        self._seconds = costs.seconds(1)

    @property
    def rows_each(self) -> float:
        """Rows of one session in a forward."""
        return self._num_rows / self._num_sessions

    def observe(self, served: Served) -> None:
        self._num_open += _WEIGHT * (served.num_open - self._num_open)
        self._num_sessions += _WEIGHT * (served.num_sessions - self._num_sessions)
        self._num_rows += _WEIGHT * (served.num_rows - self._num_rows)
        self._num_tokens += _WEIGHT * (served.num_tokens - self._num_tokens)
        self._seconds += _WEIGHT * (served.seconds - self._seconds)

    def tokens_per_s(self, num_open: int) -> float:
        """Tokens committed per second of work, the pauses between forwards included."""
        num_sessions = self._num_served(num_open)
        forward_s = self._forward_s(num_sessions)
        seconds = max(forward_s, self._seconds + forward_s - self._forward_s(self._num_sessions))
        return num_sessions * self._num_tokens / (self._num_sessions * seconds)

    def draft_rows_us(self, num_open: int) -> tuple[int, ...]:
        """Microseconds that 1, 2, ... draft tokens of every session add to a forward: entry by entry, as costs are a
        staircase. With one price for all rows, four sessions drafted five tokens (24 rows, 16.8 ms) where three (16
        rows, 11.9 ms) brought a tenth more a second.

        Of as many sessions as a forward serves in the mean: with the newest alone, of 13, 16, 15 sessions,
        five tokens were as cheap as four in one round and dear in the next, and some sessions drafted five where the
        others drafted three."""
        num_sessions = self._num_served(num_open)
        fewer = int(num_sessions)
        above = num_sessions - fewer
        prices_s = self._draft_rows_s(fewer)
        if above > 0.0:
            more_s = self._draft_rows_s(fewer + 1)
            prices_s = [low + above * (high - low) for low, high in zip(prices_s, more_s, strict=True)]
        return tuple(round(1e6 * rows_s) for rows_s in prices_s)

    def _num_served(self, num_open: int) -> float:
        """Sessions in a forward, of so many that are open."""
        return max(1.0, num_open * min(1.0, self._num_sessions / self._num_open))

    def _forward_s(self, num_sessions: float) -> float:
        return self._costs.seconds(round(num_sessions * self.rows_each))

    def _draft_rows_s(self, num_sessions: int) -> list[float]:
        return [self._costs.drafts_s(num_sessions, length) for length in range(1, _TOLD_LENGTHS + 1)]
