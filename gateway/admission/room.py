"""The verifiers' capacity for outputs: of all callers together, and of one caller while others wait.

What an output costs the others depends on the machine: on a GPU 64 sessions may take as long a round as one, on two CPU
cores 16 take twice as long as 8. So the verifiers say how long their rounds are (VerifierInfo.round_us), and one
caller's outputs may make those of all others take at most twice as long.

Not here: whose output starts next (fair_starts.py), and at which verifier (fleet/placement.py).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.gateway.fleet.pool import Pool
from outrider.shared.messages import VerifierInfo

# ratio; how much longer one caller may make the rounds of the others; tests/attacks measures it
MAX_SLOWDOWN = 2.0
# share; of all places, for one caller while others hold some; leaves the others a free place for their next output
_MAX_SHARE_AMONG_OTHERS = 0.5


@dataclass(frozen=True)
class Room:
    """The capacity of the verifiers that serve now."""

    verifiers: Pool[VerifierInfo]

    def num_places(self) -> int:
        """Returns the number of sessions that the verifiers take in total; 0: unknown, as none serves."""
        return sum(info.max_sessions for info in self._infos())

    def max_per_caller(self, num_others: int) -> int:
        """Returns the number of outputs that one caller may run while others have num_others; at least 1."""
        infos = self._infos()
        places = max(1, int(_MAX_SHARE_AMONG_OTHERS * sum(info.max_sessions for info in infos)))
        own = [_max_per_caller(info.round_us, places, num_others / len(infos)) for info in infos]
        return max(1, min(places, sum(own)))

    def _infos(self) -> list[VerifierInfo]:
        return [member.info for member in self.verifiers.healthy() if member.info is not None]


def _max_per_caller(round_us: Sequence[int], most: int, num_others: float) -> int:
    """Returns how many outputs, up to `most`, one caller may run at a verifier with num_others sessions of others."""
    if not round_us:
        return most
    rising_us = list(itertools.accumulate(round_us, max))  # more sessions that measure less are noise
    limit_us = MAX_SLOWDOWN * _round_us(rising_us, max(1.0, num_others))
    return bisect_right(range(1, most + 1), limit_us, key=lambda own: _round_us(rising_us, num_others + own))


def _round_us(round_us: Sequence[int], num_sessions: float) -> float:
    """Interpolates between the known powers of two, linearly; extrapolates beyond them."""
    power = min(int(num_sessions).bit_length() - 1, len(round_us) - 2)
    if power < 0:
        return float(round_us[0])
    before, after = round_us[power], round_us[power + 1]
    return before + (after - before) * (num_sessions / (1 << power) - 1.0)
