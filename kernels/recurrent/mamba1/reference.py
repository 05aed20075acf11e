"""Mamba-1 row by row, in plain torch: the oracle (Gu and Dao 2023, arXiv:2312.00752, algorithm 2).

Rounded to the model's dtype: after the convolution, after its silu, the time step before and after its softplus, and
the output. Everything else is fp32.
"""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer, Project
from outrider.kernels.recurrent.reference import convolve, sigmoid, softplus, walk
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows


def mamba1(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.Mamba1`."""
    return walk(raw, states, rows, lambda row, window, state: _step(row, project, layer, window, state))


def _step(
    raw: torch.Tensor, project: Project, layer: Mamba1Layer, window: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row: window and state after it, and the output [I]."""
    dtype = raw.dtype
    window, mixed = convolve(raw, window, layer.conv.weight, layer.conv.bias)
    mixed = mixed.to(dtype).float()
    x = (mixed * sigmoid(mixed)).to(dtype)
    dt, b, c = (part[0].float() for part in project(x[None]))
    dt = softplus((dt + layer.dt_bias).to(dtype).float()).to(dtype).float()
    state = state * torch.exp(dt * layer.decay_rate) + b[:, None] * (dt * x.float())
    output = (state[0] * c[:, None]).sum(0) + layer.skip * x.float()
    return window, state, output.to(dtype)
