"""The largest of many values without sorting them all: vocabularies have 150,000 tokens, truncations keep a few.

A stable argsort of 151,936 float64 takes 14 ms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Logarithms of weights beside the largest: what is above the first of these that leaves enough is all that is sorted.
# Of 152,000 tokens a few thousand are above the first at most.
LOG_FLOORS = (-8.0, -16.0, -np.inf)


def largest_first(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """int64 [min(count, N)]: where the largest of `values` [N] stand, largest first, ties in ascending order.

    The first `count` of `np.argsort(-values, kind="stable")`, where no value is NaN.
    """
    places = np.arange(len(values))
    if 0 < count < len(values):
        # All above the border, and of the ties at the border the first.
        border = np.partition(values, -count)[-count]
        above = np.flatnonzero(values > border)
        ties = np.flatnonzero(values == border)[: count - len(above)]
        places = np.concatenate((above, ties))
    return places[np.argsort(-values[places], kind="stable")][:count]


def likeliest(log_weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """int64 [at most `count`]: the tokens with the largest weights as `largest_first`, none without weight (-inf)."""
    largest = log_weights.max()
    for floor in LOG_FLOORS:
        candidates = np.flatnonzero(log_weights > largest + floor)
        if len(candidates) >= count:
            break
    return candidates[largest_first(log_weights[candidates], count)]
