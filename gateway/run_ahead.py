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

from shared.two_ways import TwoWays


class AheadTrials:
    """What all sessions of a gateway have measured together."""

    def __init__(self) -> None:
        self._trials: defaultdict[tuple[str, int], TwoWays] = defaultdict(TwoWays)

    def allows(self, method: str, open_sessions: int) -> bool:
        """Whether to ask ahead now: because it is better, or because it is its turn to be measured."""
        return self._trials[_key(method, open_sessions)].takes_second

    def observe(self, method: str, open_sessions: int, round_s: float, *, ahead: bool) -> None:
        """A round with a draft, and whether its draft could have been asked for ahead."""
        self._trials[_key(method, open_sessions)].observe(round_s, second=ahead)


def _key(method: str, open_sessions: int) -> tuple[str, int]:
    return method, round(math.log2(max(1, open_sessions)))
