"""The arguments of Mamba-1, declared once for its callers and for every kernel.

T rows, I channels, a state of size N for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import torch

from outrider.kernels.recurrent.outer_rules import ELEMENTWISE, Columns, OuterLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer

# Convolved rows [R, I] -> time steps [R, I] without their bias, B [R, N] and C [R, N], all in the model's dtype. A
# row's bits must depend on that row alone.
Project: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Mamba1Layer:
    """One layer's constants; the same for all forwards."""

    conv: ShortConvLayer
    decay_rate: torch.Tensor  # float32 [N, I], contiguous; -exp(A_log), transposed
    dt_bias: torch.Tensor  # float32 [I]; rounded to the model's dtype
    skip: torch.Tensor  # float32 [I]; D

    @cached_property
    def outer(self) -> OuterLayer:
        """Its columns are those of a row that `Project` has completed."""
        state_size, width = self.decay_rate.shape
        columns = Columns(query=2 * width + state_size, key=2 * width, value=0, beta=0, step=width)
        return OuterLayer(ELEMENTWISE, columns, 1, self.decay_rate, self.dt_bias, self.skip)


class Mamba1(Protocol):
    """A kernel of Mamba-1. A row's bits depend on the rows before it in its session, on nothing else: not on how they
    are divided into calls, nor on the other sessions."""

    def __call__(
        self, raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
    ) -> torch.Tensor:
        """raw [T, I] in the model's dtype; returns the outputs [T, I] in that dtype, before the gate.

        states.state is [num_slots, 1, N, I]. Reads rows.slots_in, writes rows.slots_out. Raises KernelArgumentError.
        """
