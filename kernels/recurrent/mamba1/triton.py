"""Mamba-1 on an NVIDIA GPU: convolution, rows and state in a launch each, and the projections between them (triton)."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.outer_rules import ELEMENTWISE
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.triton import mixed_rows
from outrider.kernels.recurrent.triton_outer_state import advance


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.Mamba1`; raw is fp32 or bf16. Raises KernelArgumentError."""
    x = mixed_rows(raw, layer.conv, states, rows)
    return advance(
        *(torch.cat([x, *project(x)], dim=1), layer.columns, states, rows),
        rule=ELEMENTWISE,
        num_key_heads=1,
        decay_rate=layer.decay_rate,
        dt_bias=layer.dt_bias,
        skip=layer.skip,
    )
