"""Load classes: numbers of sessions that share what is measured per load."""

from __future__ import annotations

import math

# classes per doubling of the sessions; 4: a class spans a fifth; chosen
LOADS_PER_DOUBLING = 4


def load_of(num_sessions: int, per_doubling: int = LOADS_PER_DOUBLING) -> int:
    """The load class of `num_sessions` >= 1, ascending: `per_doubling` classes for each doubling."""
    return round(per_doubling * math.log2(num_sessions))
