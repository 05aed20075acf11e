"""The arguments of Mamba-2, declared once for its callers and for every kernel.

T rows, H heads of size P, G groups of state size N (H a multiple of G; head h belongs to group h // (H // G)),
C = H * P + 2 * G * N channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from outrider.kernels.recurrent.outer_rules import SELECTIVE, Columns, OuterLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer


@dataclass(frozen=True)
class Mamba2Layer:
    """One layer's constants; the same for all forwards."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv: ShortConvLayer
    decay_rate: torch.Tensor  # float32 [H]; -exp(A_log)
    dt_bias: torch.Tensor  # model dtype [H]
    skip: torch.Tensor  # float32 [H]; D

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    @cached_property
    def outer(self) -> OuterLayer:
        width, group_width = self.num_heads * self.head_dim, self.num_groups * self.state_size
        columns = Columns(query=width + group_width, key=width, value=0, beta=0, step=self.num_channels)
        return OuterLayer(SELECTIVE, columns, self.num_groups, self.decay_rate, self.dt_bias.float(), self.skip)


class Mamba2(Protocol):
    """A kernel of Mamba-2. A row's bits depend on the rows before it in its session, on nothing else: not on how they
    are divided into calls, nor on the other sessions."""

    def __call__(self, raw: torch.Tensor, layer: Mamba2Layer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        """raw [T, C + H] = [x | B | C | dt] in the model's dtype; returns the outputs [T, H * P] in that dtype, before
        the gate and the norm.

        states.state is [num_slots, H, N, P]. Reads rows.slots_in, writes rows.slots_out. Raises KernelArgumentError.
        """
