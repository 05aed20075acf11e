"""What drafting takes a verifier that drafts by itself: a first token's time, and each further one's.

All sessions of a batch are drafted for together, and those that ask for the most decide how long that takes. The first
token takes the longest by far, as methods take up what was committed before it (16 sessions of an EAGLE-3 head on two
cores: 6.4 ms for one token, 10.2 for two, 12.4 for three, 15.7 for five); a mean per token made short drafts look dear
and long ones cheap, whichever were made.
"""

from __future__ import annotations

from dataclasses import dataclass

# A further token costs so much of the mean per token, until depths differ by more than about a token.
_PRIOR_SHARE = 0.6
_PRIOR_VARIANCE = 1.0
# One round that took longer than so many times the usual tells of a hiccup; one far below it is believed at once.
_OUTLIER = 3.0


@dataclass
class LocalDraftTime:
    """Least squares over rounds, older ones forgotten, with a prior for how much of the time goes with the depth."""

    _mean_depth: float = 0.0
    _mean_s: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def observe(self, depth: int, seconds: float, weight: float) -> None:
        """depth: the most tokens that a session asked for, above 0. weight: of this round among those before."""
        if self._mean_depth == 0.0 or seconds < self._mean_s / _OUTLIER:
            self._mean_depth, self._mean_s, self._variance, self._covariance = depth, seconds, 0.0, 0.0
            return
        ahead = depth - self._mean_depth
        late = min(seconds, _OUTLIER * self._mean_s) - self._mean_s
        self._mean_depth += weight * ahead
        self._mean_s += weight * late
        self._variance += weight * (ahead * ahead - self._variance)
        self._covariance += weight * (ahead * late - self._covariance)

    @property
    def token_s(self) -> float:
        """Of each token. Never more than the mean, nor less than nothing."""
        mean_s = self._mean_s / self._mean_depth if self._mean_depth else 0.0
        slope = (self._covariance + _PRIOR_VARIANCE * _PRIOR_SHARE * mean_s) / (self._variance + _PRIOR_VARIANCE)
        return min(max(0.0, slope), mean_s)

    @property
    def first_s(self) -> float:
        """Of the first token, beyond that."""
        return self._mean_s - self.token_s * self._mean_depth
