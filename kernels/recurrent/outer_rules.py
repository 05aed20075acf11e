"""The three recurrences whose state is a sum of outer products, and what they read, for the kernels of every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

DELTA, SELECTIVE, ELEMENTWISE = 0, 1, 2  # rules: the gated delta rule, Mamba-2's, Mamba-1's


class Columns(NamedTuple):
    """Offsets in a mixed row of the numbers of head 0 (or of its first key head)."""

    query: int
    key: int
    value: int
    beta: int  # DELTA only
    step: int  # what goes into softplus, with dt_bias; of all heads' decays, or of all columns


@dataclass(frozen=True)
class OuterLayer:
    """One layer's recurrence, as `advance` on each device takes it; it returns [T, H * V].

    decay_rate, dt_bias and skip are fp32. decay_rate and skip (not for DELTA) are [H], dt_bias is [H] or, for DELTA,
    [H * K]; for ELEMENTWISE decay_rate is [K, V], skip and dt_bias are [V]. decay_bound: as in GatedDeltaLayer.
    """

    rule: int
    columns: Columns
    num_key_heads: int
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor | None = None
    query_scale: float = 1.0
    beta_scale: float = 1.0
    decay_bound: float = 0.0
