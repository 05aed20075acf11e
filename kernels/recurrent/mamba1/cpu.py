"""Mamba-1 on the CPU: convolution and state in a call each, and the projections between them. Needs numba."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.cpu_outer_row import ELEMENTWISE
from outrider.kernels.recurrent.cpu_outer_state import Columns, advance
from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.cpu import mixed_rows


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.Mamba1`; raw is fp32 or bf16. Raises KernelArgumentError."""
    state_size, width = layer.decay_rate.shape
    x = mixed_rows(raw, layer.conv, states, rows)[:, :width]
    parts = [x, *(part.float() for part in project(x.to(raw.dtype)))]
    columns = Columns(query=2 * width + state_size, key=2 * width, value=0, beta=0, step=width)
    return advance(
        *(torch.cat(parts, dim=1), columns, states, rows),
        rule=ELEMENTWISE,
        dtype=raw.dtype,
        num_key_heads=1,
        decay_rate=layer.decay_rate,
        dt_bias=layer.dt_bias,
        skip=layer.skip,
    )
