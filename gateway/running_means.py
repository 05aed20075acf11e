"""Means that follow what they are of, newer figures counting more."""

from __future__ import annotations

# One round that took longer than so many times the usual tells of a hiccup, not of the costs.
OUTLIER = 3.0
FINEST_S = 1e-4


def blend(old: float | None, new: float, weight: float) -> float:
    """The old value moved towards the new one by `weight`; the new one where there is none."""
    return new if old is None else (1.0 - weight) * old + weight * new


def robust(old: float | None, new: float, before: float | None, weight: float) -> float:
    """What costs seem to be after one more answer; before: what the last one cost, None if this is the first.

    One answer that took far longer than the usual is a hiccup; two in a row are the costs. Nothing comes far too soon
    by chance, so one that did is believed at once: a method's first answer is slow where the drafter has just started.
    """
    if old is None or before is None or new < old / OUTLIER:
        return new
    if min(before, new) > OUTLIER * old + FINEST_S:
        return min(before, new)
    return blend(old, min(new, OUTLIER * old + FINEST_S), weight)
