"""Asking ahead: whether to request the next proposal while the verifier works on this one.

The request assumes that this whole draft is accepted, and that the bonus token is the drafter's next token. If so, the
next round does not wait for the drafter. If not, the drafter has worked in vain: on a shared machine it has taken the
verifier's cores, and it may delay the request that follows. The better choice depends on the distance to the drafter,
the machine, the method and the load, so an A/B trial per method and load decides.

Only for methods and modes in which a proposal cannot change the output.
"""

from __future__ import annotations

import math
from collections import defaultdict

from outrider.shared.draft_policy.ab_trial import ABTrial


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
