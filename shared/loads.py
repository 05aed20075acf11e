"""Numbers of sessions that count as one load, for what is measured per load."""

from __future__ import annotations

import math

# Loads within a fifth of each other are one load.
LOADS_PER_DOUBLING = 4


def load_of(num_sessions: int, per_doubling: int = LOADS_PER_DOUBLING) -> int:
    """The load that so many sessions, at least one, belong to: ascending, `per_doubling` for each doubling."""
    return round(per_doubling * math.log2(num_sessions))
