"""The layers of recurrences on the CPU: convolution, state and norm in a call each. Needs numba."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.cpu_outer_state import advance
from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.cpu import gated_norm
from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.cpu import mixed_rows


def gated_delta(
    raw: torch.Tensor, gate: torch.Tensor, layer: GatedDeltaLayer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `GatedDelta`; raw is fp32 or bf16. Raises KernelArgumentError."""
    attended = advance(mixed_rows(raw, layer.conv, states, rows), layer.outer, states, rows, raw.dtype)
    return gated_norm(attended, gate, layer.norm)


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `Mamba1`; raw is fp32 or bf16. Raises KernelArgumentError."""
    width = layer.decay_rate.shape[1]
    x = mixed_rows(raw, layer.conv, states, rows)[:, :width]
    parts = [x, *(part.float() for part in project(x.to(raw.dtype)))]
    return advance(torch.cat(parts, dim=1), layer.outer, states, rows, raw.dtype)


def mamba2(raw: torch.Tensor, layer: Mamba2Layer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `Mamba2`; raw is fp32 or bf16. Raises KernelArgumentError."""
    return advance(mixed_rows(raw, layer.conv, states, rows), layer.outer, states, rows, raw.dtype)
