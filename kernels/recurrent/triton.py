"""The layers of recurrences on an NVIDIA GPU: convolution, rows, state and norm in a launch each (triton)."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.triton import gated_norm
from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.triton import mixed_rows
from outrider.kernels.recurrent.triton_outer_state import advance


def gated_delta(
    raw: torch.Tensor, gate: torch.Tensor, layer: GatedDeltaLayer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `GatedDelta`; raw is fp32 or bf16. Raises KernelArgumentError."""
    attended = advance(mixed_rows(raw, layer.conv, states, rows), layer.outer, states, rows)
    return gated_norm(attended, gate, layer.norm)


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `Mamba1`; raw is fp32 or bf16. Raises KernelArgumentError."""
    x = mixed_rows(raw, layer.conv, states, rows)
    return advance(torch.cat([x, *project(x)], dim=1), layer.outer, states, rows)


def mamba2(raw: torch.Tensor, layer: Mamba2Layer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `Mamba2`; raw is fp32 or bf16. Raises KernelArgumentError."""
    return advance(mixed_rows(raw, layer.conv, states, rows), layer.outer, states, rows)
