"""The arguments of the gated delta rule, declared once for its callers and for every kernel.

T rows, Hk key heads of size dk, Hv value heads of size dv (Hv a multiple of Hk; value head h belongs to key head
h // (Hv // Hk)), C = 2 * Hk * dk + Hv * dv channels of the convolution, A decays: one per value head, or, for Kimi's
delta attention, one per value head and element of its key, A = Hv * dk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.outer_rules import DELTA, Columns, OuterLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer


@dataclass(frozen=True)
class GatedDeltaLayer:
    """One layer's constants; the same for all forwards."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: torch.Tensor  # model dtype [C, K]; column K - 1 belongs to the row itself
    decay_rate: torch.Tensor  # float32 [Hv]; -exp(A_log)
    dt_bias: torch.Tensor  # float32 [A]
    norm: GatedNormLayer  # of the outputs, in groups of dv
    beta_scale: float = 1.0
    # Not 0: of a decay for each element of a key, the logarithm lies between it and 0 (Ling 3.0):
    # decay_bound * sigmoid(-decay_rate * step), in place of decay_rate * softplus(step).
    decay_bound: float = 0.0

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @cached_property
    def conv(self) -> ShortConvLayer:
        return ShortConvLayer(self.conv_weight)

    @property
    def decays_per_head(self) -> int:
        """1 or dk."""
        return self.dt_bias.shape[0] // self.num_value_heads

    @property
    def raw_width(self) -> int:
        return self.num_channels + self.num_value_heads + self.dt_bias.shape[0]

    @cached_property
    def outer(self) -> OuterLayer:
        key_width, num_channels = self.num_key_heads * self.key_dim, self.num_channels
        columns = Columns(0, key_width, 2 * key_width, beta=num_channels, step=num_channels + self.num_value_heads)
        return OuterLayer(
            *(DELTA, columns, self.num_key_heads, self.decay_rate, self.dt_bias),
            query_scale=self.key_dim**-0.5,
            beta_scale=self.beta_scale,
            decay_bound=self.decay_bound,
        )


class GatedDelta(Protocol):
    """A kernel of the gated delta rule. A row's bits depend on the rows before it in its session, on nothing else: not
    on how they are divided into calls, nor on the other sessions."""

    def __call__(
        self,
        raw: torch.Tensor,
        gate: torch.Tensor,
        layer: GatedDeltaLayer,
        states: LayerStates,
        rows: RecurrentRows,
    ) -> torch.Tensor:
        """raw [T, C + Hv + A] = [q | k | v | b | a], gate [T, Hv * dv], both in the model's dtype; returns the
        normalised and gated outputs [T, Hv * dv] in that dtype.

        states.state is [num_slots, Hv, dk, dv]. Reads rows.slots_in, writes rows.slots_out.
        """
