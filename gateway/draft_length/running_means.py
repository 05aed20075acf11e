"""Exponential moving averages."""

from __future__ import annotations

# ratio to the mean; bounds what one round adds to it, so that a hiccup moves it little; 0487296
OUTLIER = 3.0
# s; added to that bound, as small times vary by more than their ratio; b5a197e
FINEST_S = 1e-4


def blend(old: float | None, new: float, weight: float) -> float:
    """(1 - weight) * old + weight * new; new if there is no old value."""
    return new if old is None else (1.0 - weight) * old + weight * new


def robust(old: float | None, new: float, before: float | None, weight: float) -> float:
    """The mean cost after one more answer. before: the cost of the previous answer, None for the first.

    One answer above OUTLIER times the mean is a hiccup and is bounded; two in a row are a change. One far below the
    mean is taken at once: a method's first answer is slow if the drafter has just started (b5a197e).
    """
    if old is None or before is None or new < old / OUTLIER:
        return new
    if min(before, new) > OUTLIER * old + FINEST_S:
        return min(before, new)
    return blend(old, min(new, OUTLIER * old + FINEST_S), weight)
