"""Asking ahead: whether to request the next proposal while the verifier works on this one.

The request assumes that this whole draft is accepted, and that the bonus token is the drafter's next token. If so, the
next round does not wait for the drafter. If not, the drafter has worked in vain: on a shared machine it has taken the
verifier's cores, and it may delay the request that follows. The better choice depends on the distance to the drafter,
the machine, the method and the load. What the two processes take from each other is in no cost model, so an A/B trial
per method and load decides: its two arms take turns until one is found to take less time. A result expires after a
number of rounds, and at once when the round time has changed.

Only for methods and modes in which a proposal cannot change the output.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

# share of the first arm's time; smallest gain for which the second arm is taken; 8ba6c6e: smaller ones are noise
_LEAST_GAIN = 0.02
# standard errors; difference of the means that ends a trial early; 555f641: above 2, as every round tests it
_PLAIN_ERRORS = 3.0
# share of trial_rounds; earliest end of a trial; 555f641: fewer rounds are mostly noise
_EARLIEST = 1 / 3
# multiples of trial_rounds until a result expires, doubling while it repeats; 2a9685d: trials are a ninth of all rounds
_FRESH_TRIALS = 16
_LONGEST_FRESH_TRIALS = 512
# ratio; change of the recent round time at which a result expires at once; 22928a7
_CHANGE = 1.3
# weight of the newest round in the recent round time, a mean of about 30; 22928a7
_RECENT_WEIGHT = 0.03
# ratio to the mean; bounds what one round counts; chosen: a hiccup must not decide
_OUTLIER = 3.0


class AheadTrials:
    """Shared by all sessions of a gateway. The second arm of each trial asks ahead."""

    def __init__(self) -> None:
        self._trials: defaultdict[tuple[str, int], ABTrial] = defaultdict(ABTrial)

    def allows(self, method: str, open_sessions: int) -> bool:
        """Returns whether to ask ahead now."""
        return self._trials[_key(method, open_sessions)].takes_second

    def observe(self, method: str, open_sessions: int, round_s: float, *, ahead: bool) -> None:
        """Records a round with a draft. ahead: whether it was a round of the second arm."""
        self._trials[_key(method, open_sessions)].observe(round_s, second=ahead)


def _key(method: str, open_sessions: int) -> tuple[str, int]:
    return method, round(math.log2(max(1, open_sessions)))


@dataclass
class _Rounds:
    """Rounds of one arm."""

    seconds: float = 0.0
    squares: float = 0.0
    count: int = 0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count

    @property
    def squared_error(self) -> float:
        """Returns the squared error of the mean."""
        return max(0.0, self.squares / self.count - self.mean_s**2) / self.count

    def add(self, round_s: float) -> None:
        round_s = min(round_s, _OUTLIER * self.mean_s) if self.count else round_s
        self.seconds += round_s
        self.squares += round_s**2
        self.count += 1


@dataclass
class ABTrial:
    """`takes_second`: whether the next round should use the second arm. `observe`: what a round took.

    turn_rounds: rounds of one turn. trial_rounds: rounds of each arm in a trial.
    Turns go first, second, second, first: a trend over the turns, as in texts of requests that began together, favours
    neither arm (56f2224).
    """

    turn_rounds: int = 16
    trial_rounds: int = 64
    _is_second_better: bool = False
    # Rounds until the result expires (0: a trial is running), and its validity in trials' rounds.
    _fresh_left: int = 0
    _fresh_trials: int = _FRESH_TRIALS
    _num_seen: int = 0
    _rounds: dict[bool, _Rounds] = field(default_factory=lambda: {False: _Rounds(), True: _Rounds()})
    # Seconds of a round of the chosen arm: at the result, and recently.
    _chosen_s: float = 0.0
    _recent_s: float = 0.0

    @property
    def takes_second(self) -> bool:
        if self._fresh_left > 0:
            return self._is_second_better
        return (self._num_seen // self.turn_rounds) % 4 in (1, 2)

    def observe(self, round_s: float, *, second: bool) -> None:
        """Records a round of the second arm, or the first."""
        if self._fresh_left > 0:
            self._fresh_left -= 1
            self._recent_s += _RECENT_WEIGHT * (min(round_s, _OUTLIER * self._recent_s) - self._recent_s)
            if not 1.0 / _CHANGE < self._recent_s / self._chosen_s < _CHANGE:
                self._fresh_left, self._fresh_trials = 0, _FRESH_TRIALS
            return
        self._rounds[second].add(round_s)
        self._num_seen += 1
        least = min(rounds.count for rounds in self._rounds.values())
        if least >= self.trial_rounds or (least >= _EARLIEST * self.trial_rounds and self._is_plain()):
            self._settle()

    def _is_plain(self) -> bool:
        first, second = self._rounds[False], self._rounds[True]
        error = math.sqrt(first.squared_error + second.squared_error)
        return abs(first.mean_s - second.mean_s) > _PLAIN_ERRORS * error + _LEAST_GAIN * first.mean_s

    def _settle(self) -> None:
        first, second = self._rounds[False], self._rounds[True]
        is_better = second.mean_s < (1.0 - _LEAST_GAIN) * first.mean_s
        same = is_better == self._is_second_better
        self._fresh_trials = min(2 * self._fresh_trials, _LONGEST_FRESH_TRIALS) if same else _FRESH_TRIALS
        self._is_second_better, self._fresh_left = is_better, self._fresh_trials * self.trial_rounds
        self._chosen_s = self._recent_s = self._rounds[is_better].mean_s
        self._rounds, self._num_seen = {False: _Rounds(), True: _Rounds()}, 0
