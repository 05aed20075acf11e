"""Mamba-2 row by row, in plain torch: the oracle (Dao and Gu 2024, arXiv:2405.21060, section 3).

Rounded to the model's dtype: after the convolution, after its silu, the time step before and after its softplus, and
the output. Everything else is fp32. Time steps have no limits, as when transformers and vLLM decode: the chunked form
of transformers' Nemotron-H raises them to `time_step_min` in prompts alone, so there prompt and decode disagree.
"""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.reference import convolve, sigmoid, softplus, walk
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows


def mamba2(raw: torch.Tensor, layer: Mamba2Layer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `arguments.Mamba2`."""
    return walk(raw, states, rows, lambda row, window, state: _step(row, layer, window, state))


def _step(
    raw: torch.Tensor, layer: Mamba2Layer, window: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row: window and state after it, and the output [H * P]."""
    dtype = raw.dtype
    channels, dt = torch.split(raw, [layer.num_channels, layer.num_heads])
    window, mixed = convolve(channels, window, layer.conv.weight, layer.conv.bias)
    mixed = mixed.to(dtype).float()
    mixed = (mixed * sigmoid(mixed)).to(dtype).float()
    group_width = layer.num_groups * layer.state_size
    x, b, c = torch.split(mixed, [layer.num_heads * layer.head_dim, group_width, group_width])
    x, b, c = x.view(layer.num_heads, layer.head_dim), _spread(b, layer), _spread(c, layer)
    dt = softplus((dt + layer.dt_bias).float()).to(dtype).float()
    state = state * torch.exp(dt * layer.decay_rate)[:, None, None] + b[:, :, None] * (dt[:, None] * x)[:, None, :]
    output = (state * c[:, :, None]).sum(1) + layer.skip[:, None] * x
    return window, state, output.to(dtype).flatten()


def _spread(groups: torch.Tensor, layer: Mamba2Layer) -> torch.Tensor:
    """B or C [G * N] for each head: [H, N]."""
    return groups.view(layer.num_groups, -1).repeat_interleave(layer.num_heads // layer.num_groups, dim=0)
