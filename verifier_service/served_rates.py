"""What a verifier tells of its work: the rate at which tokens come, and what draft tokens would add to a forward.

Both are of the number of sessions that there is now. A mean over the last rounds is of those that there were: of
sixteen requests that came together each was told the prices of the two before them, and drafted five tokens where two
or three pay, for the first 6 to 9 of its 35 rounds. So what is smoothed does not follow the load by itself: the share
of the open sessions that a forward serves, and the tokens and rows that each of them has in it.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.draft_prices import PRICED_DRAFTS
from verifier_service.step_costs import StepCosts

_WEIGHT = 0.08
# Prices are told again after so many forwards, and whenever the sessions of one are others.
_PRICES_LAST = 8
_SAME_SESSIONS = 0.02


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
        # What was told last, of so many sessions in a forward, and the forwards since.
        self._prices_us: tuple[int, ...] = ()
        self._prices_of = 0.0
        self._prices_age = 0

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
        """Microseconds that so many draft tokens of every session (PRICED_DRAFTS) add to a forward: entry by entry, as
        costs are a staircase. With one price for all rows, four sessions drafted five tokens (24 rows, 16.8 ms) where
        three (16 rows, 11.9 ms) brought a tenth more a second.

        Of as many sessions as a forward serves in the mean: with the newest alone, of 13, 16, 15 sessions, five tokens
        were as cheap as four in one round and dear in the next, and some sessions drafted five where the others drafted
        three."""
        num_sessions = self._num_served(num_open)
        is_another = abs(num_sessions - self._prices_of) > _SAME_SESSIONS * self._prices_of
        if is_another or self._prices_age >= _PRICES_LAST:
            self._prices_us = tuple(round(1e6 * self._draft_s(num_sessions, length)) for length in PRICED_DRAFTS)
            self._prices_of, self._prices_age = num_sessions, 0
        self._prices_age += 1
        return self._prices_us

    def _num_served(self, num_open: int) -> float:
        """Sessions in a forward, of so many that are open."""
        return max(1.0, num_open * min(1.0, self._num_sessions / self._num_open))

    def _forward_s(self, num_sessions: float) -> float:
        return self._costs.seconds(num_sessions * self.rows_each)

    def _draft_s(self, num_sessions: float, num_draft_tokens: float) -> float:
        """In the mean over forwards of as many sessions, and of one more."""
        fewer = int(num_sessions)
        above = num_sessions - fewer
        fewer_s = self._costs.drafts_s(fewer, num_draft_tokens)
        return fewer_s + (above * (self._costs.drafts_s(fewer + 1, num_draft_tokens) - fewer_s) if above else 0.0)
