"""The cost of a round at one load: measured without drafts, and modelled and measured with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.verifier_service.draft_length.limits import COST_WEIGHT, OUTLIER, PLAIN_ROUNDS, PRIOR_SLOPE, RATE_MEMORY


@dataclass
class Rounds:
    """Sums over rounds with an exponential memory of RATE_MEMORY."""

    tokens: float = 0.0
    seconds: float = 0.0
    count: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / RATE_MEMORY
        if self.count >= PLAIN_ROUNDS:
            seconds = min(seconds, OUTLIER * self.mean_s)
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds
        self.count = keep * self.count + 1.0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass
class DraftTime:
    """Seconds of drafting k tokens for a batch: a line fitted to the newest drafts.

    is_one_pass: all tokens of a draft come at once, so nothing is assumed of the slope. mean_travel_s: of messages,
    which take the same for all lengths. of_few: drafts of a look at few sessions; those of a whole batch replace them.
    """

    is_one_pass: bool = False
    mean_length: float = 0.0
    mean_s: float = 0.0
    mean_travel_s: float = 0.0
    of_few: bool = False
    _variance: float = 0.0
    _covariance: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.mean_length > 0.0

    def copy(self) -> DraftTime:
        """Returns the means as the estimate for another load, where lengths have not varied yet."""
        return DraftTime(self.is_one_pass, self.mean_length, self.mean_s, self.mean_travel_s, self.of_few)

    def observe(self, length: int, seconds: float, travel_s: float = 0.0, *, of_few: bool = False) -> None:
        """Learns from a batch of drafts. travel_s: the part of the seconds that messages took. of_few: as above."""
        if of_few and self.is_known and not self.of_few:
            return
        if not self.is_known or self.of_few > of_few or seconds < self.mean_s / OUTLIER:
            # The first; or the first that had nothing to catch up with.
            self.mean_length, self.mean_s, self.mean_travel_s, self.of_few = float(length), seconds, travel_s, of_few
            self._variance = self._covariance = 0.0
            return
        self.mean_travel_s += COST_WEIGHT * (min(travel_s, seconds, OUTLIER * self.mean_s) - self.mean_travel_s)
        longer, longer_s = length - self.mean_length, min(seconds, OUTLIER * self.mean_s) - self.mean_s
        self.mean_length += COST_WEIGHT * longer
        self.mean_s += COST_WEIGHT * longer_s
        self._variance += COST_WEIGHT * (longer * longer - self._variance)
        self._covariance += COST_WEIGHT * (longer * longer_s - self._covariance)

    def seconds(self, length: int) -> float:
        """Returns the fitted seconds of a draft of `length` tokens; 0 before the first draft."""
        if not self.is_known:
            return 0.0
        each_s = max(0.0, self.mean_s - self.mean_travel_s) / self.mean_length
        prior_s = 0.0 if self.is_one_pass else PRIOR_SLOPE * each_s
        slope_s = min(max(0.0, (self._covariance + prior_s) / (self._variance + 1.0)), each_s)
        return max(0.0, self.mean_s + slope_s * (length - self.mean_length))


@dataclass
class MethodCosts:
    """The costs of one method at one load. drafted, modelled: the same rounds, as measured and as modelled.

    rows_s: seconds that drafts add to a forward, by length, as of round `rows_at`.
    """

    time: DraftTime
    drafted: Rounds = field(default_factory=Rounds)
    modelled: Rounds = field(default_factory=Rounds)
    rows_s: list[float] = field(default_factory=list)
    rows_at: int = 0

    @property
    def slowness(self) -> float:
        """Measured over modelled seconds; the model counts as PLAIN_ROUNDS rounds."""
        if not self.drafted.count:
            return 1.0
        weight = self.drafted.count / (self.drafted.count + PLAIN_ROUNDS)
        return 1.0 + weight * (self.drafted.seconds / self.modelled.seconds - 1.0)


@dataclass
class LoadCosts:
    """The costs of one load class. batch_sessions: mean sessions in a forward.

    since_look_s, look_debt_s: seconds since the last look, and what looks have cost that is not paid for yet.
    since_plain_s: seconds since the last round without drafts. gains: of the methods within gains_limits, as of round
    gains_at; no limits: not known.
    """

    batch_sessions: float
    plain: Rounds = field(default_factory=Rounds)
    methods: dict[str, MethodCosts] = field(default_factory=dict)
    gains: Mapping[str, Sequence[float]] = field(default_factory=dict)
    gains_limits: Mapping[str, int] | None = None
    gains_at: int = 0
    since_look_s: float = math.inf
    look_debt_s: float = 0.0
    since_plain_s: float = 0.0
