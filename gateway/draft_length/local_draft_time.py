"""Time of local drafting: a first token's seconds, and those of each further token.

All sessions of a batch are drafted for together, so the deepest draft determines the time. The first token takes the
longest, as methods read what was committed before it (16 sessions, EAGLE-3 head, two cores: 6.4 ms for one token, 12.4
for three). A mean per token would make short drafts look costly and long ones cheap (0a2870c).
"""

from __future__ import annotations

from dataclasses import dataclass

# share of the mean per token; prior for the cost of a further token; 0a2870c
_PRIOR_SHARE = 0.6
# tokens squared; weight of that prior: the variance of depths at which the measured slope counts as much; 0a2870c
_PRIOR_VARIANCE = 1.0
# ratio to the mean; bounds what a slow round adds; a round faster by more restarts the fit; as in running_means
_OUTLIER = 3.0


@dataclass
class LocalDraftTime:
    """Least squares of seconds over depth, exponentially weighted, with a prior for the slope."""

    _mean_depth: float = 0.0
    _mean_s: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def observe(self, depth: int, seconds: float, weight: float) -> None:
        """depth: the most tokens that a session of the batch asked for, above 0. weight: of this round in the means."""
        if self._mean_depth == 0.0 or seconds < self._mean_s / _OUTLIER:
            self._mean_depth, self._mean_s, self._variance, self._covariance = depth, seconds, 0.0, 0.0
            return
        depth_change = depth - self._mean_depth
        change_s = min(seconds, _OUTLIER * self._mean_s) - self._mean_s
        self._mean_depth += weight * depth_change
        self._mean_s += weight * change_s
        self._variance += weight * (depth_change * depth_change - self._variance)
        self._covariance += weight * (depth_change * change_s - self._covariance)

    @property
    def token_s(self) -> float:
        """Seconds per token; between 0 and the mean per token."""
        mean_s = self._mean_s / self._mean_depth if self._mean_depth else 0.0
        slope = (self._covariance + _PRIOR_VARIANCE * _PRIOR_SHARE * mean_s) / (self._variance + _PRIOR_VARIANCE)
        return min(max(0.0, slope), mean_s)

    @property
    def first_s(self) -> float:
        """Seconds of the first token beyond token_s."""
        return self._mean_s - self.token_s * self._mean_depth
