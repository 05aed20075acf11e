"""The three recurrences whose state is a sum of outer products, and what they read, for the kernels of every device."""

from __future__ import annotations

from typing import NamedTuple

DELTA, SELECTIVE, ELEMENTWISE = 0, 1, 2  # rules: the gated delta rule, Mamba-2's, Mamba-1's


class Columns(NamedTuple):
    """Where a mixed row has the numbers of head 0 (or of its first key head)."""

    query: int
    key: int
    value: int
    beta: int  # DELTA only
    step: int  # what goes into softplus, with dt_bias; of all heads' decays, or of all columns
