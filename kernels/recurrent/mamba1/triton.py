"""Mamba-1 on an NVIDIA GPU: convolution, rows and state in a launch each, and the projections between them (triton)."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.triton import mixed_rows
from outrider.kernels.recurrent.triton_outer_rows import ELEMENTWISE, Columns
from outrider.kernels.recurrent.triton_outer_state import advance


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.Mamba1`; raw is fp32 or bf16. Raises KernelArgumentError."""
    state_size, width = layer.decay_rate.shape
    x = mixed_rows(raw, layer.conv, states, rows)
    columns = Columns(query=2 * width + state_size, key=2 * width, value=0, beta=0, step=width)
    return advance(
        *(torch.cat([x, *project(x)], dim=1), columns, states, rows),
        rule=ELEMENTWISE,
        num_key_heads=1,
        decay_rate=layer.decay_rate,
        dt_bias=layer.dt_bias,
        skip=layer.skip,
    )
