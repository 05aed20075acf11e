"""Mamba-1 on the CPU: convolution and state in a call each, and the projections between them. Needs numba."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.cpu_outer_state import advance
from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.outer_rules import ELEMENTWISE
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.cpu import mixed_rows


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.Mamba1`; raw is fp32 or bf16. Raises KernelArgumentError."""
    width = layer.decay_rate.shape[1]
    x = mixed_rows(raw, layer.conv, states, rows)[:, :width]
    parts = [x, *(part.float() for part in project(x.to(raw.dtype)))]
    return advance(
        *(torch.cat(parts, dim=1), layer.columns, states, rows),
        rule=ELEMENTWISE,
        dtype=raw.dtype,
        num_key_heads=1,
        decay_rate=layer.decay_rate,
        dt_bias=layer.dt_bias,
        skip=layer.skip,
    )
