"""What a verifier reports with each commit: its tokens per second, and what draft tokens would add to a forward.

Both are for the sessions open now. Means over past rounds would describe the load before a burst of requests, so only
ratios that hardly depend on the load are smoothed: the share of open sessions in a forward, and tokens and rows per
session (docs/log.md: bdc3086).
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.shared.draft_policy.draft_prices import PRICED_DRAFTS
from outrider.verifier_service.timing.step_costs import StepCosts

# weight of the newest forward in the means, about 12 forwards; b7efff9
_WEIGHT = 0.08
# forwards until prices are computed again; 5360f68
_PRICE_FORWARDS = 8
# share; a larger change of the sessions in a forward renews the prices at once; 5360f68
_SAME_SESSIONS = 0.02


class Served(NamedTuple):
    """A forward without its prompts. num_open: open sessions. seconds: since the end of the forward before it."""

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
        # The current prices, the sessions in a forward that they are for, and the forwards since they were computed.
        self._prices_us: tuple[int, ...] = ()
        self._prices_num_sessions = 0.0
        self._prices_age = 0

    @property
    def rows_each(self) -> float:
        """Rows per session in a forward."""
        return self._num_rows / self._num_sessions

    def observe(self, served: Served) -> None:
        self._num_open += _WEIGHT * (served.num_open - self._num_open)
        self._num_sessions += _WEIGHT * (served.num_sessions - self._num_sessions)
        self._num_rows += _WEIGHT * (served.num_rows - self._num_rows)
        self._num_tokens += _WEIGHT * (served.num_tokens - self._num_tokens)
        self._seconds += _WEIGHT * (served.seconds - self._seconds)

    def tokens_per_s(self, num_open: int) -> float:
        """Tokens committed per second, pauses between forwards included, with num_open sessions."""
        num_sessions = self._num_served(num_open)
        forward_s = self._forward_s(num_sessions)
        seconds = max(forward_s, self._seconds + forward_s - self._forward_s(self._num_sessions))
        return num_sessions * self._num_tokens / (self._num_sessions * seconds)

    def round_us(self, max_open: int) -> tuple[int, ...]:
        """Microseconds of a round while 1, 2, 4, ... sessions are open, as far as needed to cover max_open."""
        pauses_s = max(0.0, self._seconds - self._forward_s(self._num_sessions))
        served = [self._num_served(1 << power) for power in range((max_open - 1).bit_length() + 1)]
        forwards_s = [self._costs.seconds_beside(number * self.rows_each, number) for number in served]
        return tuple(round(1e6 * (pauses_s + forward_s)) for forward_s in forwards_s)

    def draft_rows_us(self, num_open: int) -> tuple[int, ...]:
        """Microseconds that each length of PRICED_DRAFTS, drafted by every session, adds to a forward.

        For the mean number of sessions in a forward: prices for the newest forward's would jump between steps of the
        row costs, and sessions would settle on different lengths.
        """
        num_sessions = self._num_served(num_open)
        has_changed = abs(num_sessions - self._prices_num_sessions) > _SAME_SESSIONS * self._prices_num_sessions
        if has_changed or self._prices_age >= _PRICE_FORWARDS:
            self._prices_us = tuple(round(1e6 * self._draft_s(num_sessions, length)) for length in PRICED_DRAFTS)
            self._prices_num_sessions, self._prices_age = num_sessions, 0
        self._prices_age += 1
        return self._prices_us

    def _num_served(self, num_open: int) -> float:
        """Mean sessions in a forward while num_open are open."""
        return max(1.0, num_open * min(1.0, self._num_sessions / self._num_open))

    def _forward_s(self, num_sessions: float) -> float:
        return self._costs.seconds(num_sessions * self.rows_each)

    def _draft_s(self, num_sessions: float, num_draft_tokens: float) -> float:
        """Seconds; interpolated between the whole numbers of sessions."""
        fewer = int(num_sessions)
        above = num_sessions - fewer
        fewer_s = self._costs.drafts_s(fewer, num_draft_tokens)
        return fewer_s + (above * (self._costs.drafts_s(fewer + 1, num_draft_tokens) - fewer_s) if above else 0.0)
