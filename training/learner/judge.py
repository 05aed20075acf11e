"""Decides on served text that nothing was trained on whether a head is better than the one that serves.

A swap is only worth its cost, and only safe, if the gain is larger than chance: heads that had learned from little text
were worse than before in every pilot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from outrider.training.heads.interface import DraftScores

# windows; fewer give no standard error to rely on
FEWEST_WINDOWS = 12
# share of tokens a round; the least gain that is worth caches and warm-up of another version
_LEAST_GAIN = 0.01
# share; most that greedy or sampled drafts, or older traffic, may lose where the whole gains: above the noise of a few
# dozen windows
_MOST_LOST = 0.02
# standard errors; 1 in 40 heads of equal worth passes by chance, 1 in 25 where windows are added twice, and the live
# trial follows
_ERRORS = 2.0


@dataclass(frozen=True)
class Lengths:
    """Expected tokens a round on one window, the target's own included: of greedy rounds, and at temperature 1."""

    greedy: float
    sampled: float

    @classmethod
    def of(cls, scores: DraftScores) -> Lengths:
        """Multiplies the acceptance of each depth with all before it, as if they were independent."""
        counts = scores.num_positions.clamp(min=1)
        return cls(_length((scores.agreement / counts).tolist()), _length((scores.overlap / counts).tolist()))

    @property
    def mean(self) -> float:
        return (self.greedy + self.sampled) / 2


@dataclass(frozen=True)
class Verdict:
    """`refusal` is why the candidate is not taken; empty: it is. Lengths are means over the windows.

    is_doubtful: it gains enough, if that is not by chance; more windows may tell.
    """

    before: Lengths
    after: Lengths
    num_windows: int
    refusal: str
    is_doubtful: bool


def judge(before: Sequence[Lengths], after: Sequence[Lengths], is_old: Sequence[bool]) -> Verdict:
    """Compares two heads on the same windows, window by window; is_old: the windows of older traffic."""
    was, now = (
        Lengths(fmean(each.greedy for each in side), fmean(each.sampled for each in side)) for side in (before, after)
    )
    gains = [new.mean - old.mean for old, new in zip(before, after, strict=True)]
    if not all(map(math.isfinite, gains)):
        return Verdict(was, now, len(before), "its outputs are not finite", is_doubtful=False)
    base = was.mean
    gain, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
    if gain <= max(_ERRORS * error, _LEAST_GAIN * base):
        refusal = f"it gains {gain / base:+.1%} of tokens a round, with a standard error of {error / base:.1%}"
        return Verdict(was, now, len(before), refusal, is_doubtful=gain > _LEAST_GAIN * base)
    return Verdict(was, now, len(before), _loss(before, after, is_old), is_doubtful=False)


def _loss(before: Sequence[Lengths], after: Sequence[Lengths], is_old: Sequence[bool]) -> str:
    """Returns where a head that gains as a whole loses too much; empty: nowhere."""
    old_before = [each.mean for each, old in zip(before, is_old, strict=True) if old]
    old_after = [each.mean for each, old in zip(after, is_old, strict=True) if old]
    scopes = {
        "greedy rounds": ([each.greedy for each in before], [each.greedy for each in after]),
        "rounds at temperature 1": ([each.sampled for each in before], [each.sampled for each in after]),
        "rounds of older traffic": (old_before, old_after),
    }
    for name, (was, now) in scopes.items():
        if len(was) >= FEWEST_WINDOWS and fmean(now) < (1 - _MOST_LOST) * fmean(was):
            return f"{name} lose {1 - fmean(now) / fmean(was):.1%} of their tokens a round"
    return ""


def _length(acceptance: Sequence[float]) -> float:
    total = reached = 1.0
    for share in acceptance:
        reached *= share
        total += reached
    return total
