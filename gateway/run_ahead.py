"""Whether to ask drafters for the next proposal while the verifier works on this one.

The question stands on a guess: that all of this draft is accepted, and that the bonus token is the one that the
drafter would have drafted next. When the guess holds, the next round need not wait for the drafter. When it does not,
the drafter has worked for nothing; on a machine that it shares with the verifier it has also taken the verifier's
cores, and its late work may delay the question that is asked instead. What outweighs what depends on the way to the
drafter, the machine, the method and the load, so it is measured: rounds with and without, in turn, and whichever were
shorter.

A round's output does not depend on it: for methods and modes in which a proposal cannot change the output only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

# Rounds of one kind before the other's turn, and of each kind in a comparison.
_BLOCK_ROUNDS = 16
_TRIAL_ROUNDS = 64
# Rounds must be shorter by this share: smaller differences are within the noise.
_MIN_GAIN = 0.02
# Rounds that a comparison is good for; twice as many each time it comes to the same end.
_FRESH_ROUNDS = 1024
_LONGEST_FRESH_ROUNDS = 32_768
# Rounds that have become longer or shorter by this factor, as the mean of about 30, are compared anew at once.
_CHANGE = 1.3
_RECENT_WEIGHT = 0.03
# One round counts for no more than so many usual ones.
_OUTLIER = 3.0


@dataclass
class _Rounds:
    seconds: float = 0.0
    count: int = 0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count

    def add(self, round_s: float) -> None:
        self.seconds += min(round_s, _OUTLIER * self.mean_s) if self.count else round_s
        self.count += 1


@dataclass
class _Trial:
    """Of one method at one load."""

    is_better: bool = False
    # Rounds until the next comparison; 0: it is on.
    fresh_left: int = 0
    fresh_rounds: int = _FRESH_ROUNDS
    rounds: dict[bool, _Rounds] = field(default_factory=lambda: {False: _Rounds(), True: _Rounds()})
    # Of the way that was chosen: then, and lately.
    chosen_s: float = 0.0
    recent_s: float = 0.0

    @property
    def allows(self) -> bool:
        if self.fresh_left > 0:
            return self.is_better
        num_seen = sum(rounds.count for rounds in self.rounds.values())
        return (num_seen // _BLOCK_ROUNDS) % 2 == 1

    def observe(self, round_s: float, *, ahead: bool) -> None:
        if self.fresh_left > 0:
            self.fresh_left -= 1
            self.recent_s += _RECENT_WEIGHT * (min(round_s, _OUTLIER * self.recent_s) - self.recent_s)
            if not 1.0 / _CHANGE < self.recent_s / self.chosen_s < _CHANGE:
                self.fresh_left, self.fresh_rounds = 0, _FRESH_ROUNDS
            return
        self.rounds[ahead].add(round_s)
        if min(rounds.count for rounds in self.rounds.values()) >= _TRIAL_ROUNDS:
            self._settle()

    def _settle(self) -> None:
        is_better = self.rounds[True].mean_s < (1.0 - _MIN_GAIN) * self.rounds[False].mean_s
        same = is_better == self.is_better
        self.fresh_rounds = min(2 * self.fresh_rounds, _LONGEST_FRESH_ROUNDS) if same else _FRESH_ROUNDS
        self.is_better, self.fresh_left = is_better, self.fresh_rounds
        self.chosen_s = self.recent_s = self.rounds[is_better].mean_s
        self.rounds = {False: _Rounds(), True: _Rounds()}


class AheadTrials:
    """What all sessions of a gateway have measured together."""

    def __init__(self) -> None:
        self._trials: defaultdict[tuple[str, int], _Trial] = defaultdict(_Trial)

    def allows(self, method: str, open_sessions: int) -> bool:
        """Whether to ask ahead now: because it is better, or because it is its turn to be measured."""
        return self._trials[_key(method, open_sessions)].allows

    def observe(self, method: str, open_sessions: int, round_s: float, *, ahead: bool) -> None:
        """A round with a draft, and whether its draft could have been asked for ahead."""
        self._trials[_key(method, open_sessions)].observe(round_s, ahead=ahead)


def _key(method: str, open_sessions: int) -> tuple[str, int]:
    return method, round(math.log2(max(1, open_sessions)))
