"""Which of two ways takes less time, found by taking turns: measured anew now and then, and at once after a change.

For choices that no model foresees: what a way takes depends on the machine, the load and who else is on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_LEAST_GAIN = 0.02
# A comparison ends early where the means are so many standard errors apart, from this part of its rounds on.
_PLAIN_ERRORS = 3.0
_EARLIEST = 1 / 3
# A comparison is good for so many trials' rounds; for twice as many each time it comes to the same end.
_FRESH_TRIALS = 16
_LONGEST_FRESH_TRIALS = 512
# Rounds that have become longer or shorter by this factor, as the mean of about 30, are compared anew at once.
_CHANGE = 1.3
_RECENT_WEIGHT = 0.03
# One round counts for no more than so many usual ones.
_OUTLIER = 3.0


@dataclass
class _Rounds:
    seconds: float = 0.0
    squares: float = 0.0
    count: int = 0
    num_told: int = 0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count

    @property
    def squared_error(self) -> float:
        """Of the mean. Rounds that were told of together say as much as one."""
        return max(0.0, self.squares / self.count - self.mean_s**2) / self.num_told

    def add(self, round_s: float, count: int) -> None:
        round_s = min(round_s, _OUTLIER * self.mean_s) if self.count else round_s
        self.seconds += count * round_s
        self.squares += count * round_s**2
        self.count += count
        self.num_told += 1


@dataclass
class TwoWays:
    """`takes_second` says which way the next round should go; `observe` is told what the last one took.

    trial_rounds: of each way in a comparison. turn_rounds: of a turn; those at its start that the way before it may
    still have a part in, settle_rounds, do not count. The ways take turns as first, second, second, first: so what gets
    easier or harder from turn to turn, as the texts of requests that began together do, favours neither.
    """

    turn_rounds: int = 16
    trial_rounds: int = 64
    settle_rounds: int = 0
    # The second way must take less time by this share: smaller differences are within the noise.
    least_gain: float = _LEAST_GAIN
    _is_second_better: bool = False
    # Rounds until the next comparison (0: it is on), and how many trials' rounds that was last time.
    _fresh_left: int = 0
    _fresh_trials: int = _FRESH_TRIALS
    _num_seen: int = 0
    _rounds: dict[bool, _Rounds] = field(default_factory=lambda: {False: _Rounds(), True: _Rounds()})
    # Of the way that was chosen: then, and lately.
    _chosen_s: float = 0.0
    _recent_s: float = 0.0

    @property
    def takes_second(self) -> bool:
        if self._fresh_left > 0:
            return self._is_second_better
        return (self._num_seen // self.turn_rounds) % 4 in (1, 2)

    def observe(self, round_s: float, *, second: bool, count: int = 1) -> None:
        """`count` rounds of `round_s` seconds each that went this way."""
        if self._fresh_left > 0:
            self._fresh_left = max(0, self._fresh_left - count)
            self._recent_s += _RECENT_WEIGHT * (min(round_s, _OUTLIER * self._recent_s) - self._recent_s)
            if not 1.0 / _CHANGE < self._recent_s / self._chosen_s < _CHANGE:
                self._fresh_left, self._fresh_trials = 0, _FRESH_TRIALS
            return
        if self._num_seen % self.turn_rounds >= self.settle_rounds:
            self._rounds[second].add(round_s, count)
        self._num_seen += count
        least = min(rounds.count for rounds in self._rounds.values())
        if least >= self.trial_rounds or (least >= _EARLIEST * self.trial_rounds and self._differ_plainly()):
            self._settle()

    def _differ_plainly(self) -> bool:
        first, second = self._rounds[False], self._rounds[True]
        error = math.sqrt(first.squared_error + second.squared_error)
        return abs(first.mean_s - second.mean_s) > _PLAIN_ERRORS * error + self.least_gain * first.mean_s

    def _settle(self) -> None:
        first, second = self._rounds[False], self._rounds[True]
        is_better = second.mean_s < (1.0 - self.least_gain) * first.mean_s
        same = is_better == self._is_second_better
        self._fresh_trials = min(2 * self._fresh_trials, _LONGEST_FRESH_TRIALS) if same else _FRESH_TRIALS
        self._is_second_better, self._fresh_left = is_better, self._fresh_trials * self.trial_rounds
        self._chosen_s = self._recent_s = self._rounds[is_better].mean_s
        self._rounds, self._num_seen = {False: _Rounds(), True: _Rounds()}, 0
