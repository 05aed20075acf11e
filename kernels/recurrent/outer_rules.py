"""The three recurrences whose state is a sum of outer products, and what they read, for the kernels of every device.

Of `advance` on each device: decay_rate, dt_bias and skip are fp32. decay_rate and skip (not for DELTA) are [H], dt_bias
is [H] or, for DELTA, [H * K]; for ELEMENTWISE decay_rate is [K, V], skip and dt_bias are [V]. It returns [T, H * V].
"""

from __future__ import annotations

from typing import NamedTuple

DELTA, SELECTIVE, ELEMENTWISE = 0, 1, 2  # rules: the gated delta rule, Mamba-2's, Mamba-1's


class Columns(NamedTuple):
    """Offsets in a mixed row of the numbers of head 0 (or of its first key head)."""

    query: int
    key: int
    value: int
    beta: int  # DELTA only
    step: int  # what goes into softplus, with dt_bias; of all heads' decays, or of all columns
