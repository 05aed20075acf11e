"""The gated delta rule row by row, in plain torch: the oracle (Yang et al. 2024, arXiv:2412.06464, eq. 10;
with a decay per element of the key: Kimi Team 2025, arXiv:2510.26692, eq. 1).

Rounded to the model's dtype where transformers rounds: after the convolution, after its silu, beta, the output, and in
the norm. Everything else is fp32.
"""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.reference import gated_norm
from outrider.kernels.recurrent.reference import convolve, sigmoid, softplus, walk
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows

_NORM_EPS = 1e-6  # added to the sum of squares of a query or key; transformers' l2norm


def gated_delta(
    raw: torch.Tensor, gate: torch.Tensor, layer: GatedDeltaLayer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.GatedDelta`."""
    attended = walk(raw, states, rows, lambda row, window, state: _step(row, layer, window, state))
    return gated_norm(attended.to(raw.dtype).flatten(1), gate, layer.norm)


def _step(
    raw: torch.Tensor, layer: GatedDeltaLayer, window: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row: window and state after it, and what it reads from the state [Hv, dv] in fp32."""
    num_heads, dtype = layer.num_value_heads, raw.dtype
    channels, b, a = torch.split(raw, [layer.num_channels, num_heads, layer.dt_bias.shape[0]])
    window, mixed = convolve(channels, window, layer.conv_weight, None)
    mixed = mixed.to(dtype).float()
    mixed = (mixed * sigmoid(mixed)).to(dtype).float()
    key_width = layer.num_key_heads * layer.key_dim
    query, key, value = torch.split(mixed, [key_width, key_width, num_heads * layer.value_dim])
    query = _spread(query, layer) * layer.key_dim**-0.5
    key, value = _spread(key, layer), value.view(num_heads, layer.value_dim)
    beta = sigmoid(b.float()).to(dtype).float() * layer.beta_scale
    step, rate = (a.float() + layer.dt_bias).view(num_heads, layer.decays_per_head, 1), layer.decay_rate[:, None, None]
    bound = layer.decay_bound
    state = state * torch.exp(bound * sigmoid(-rate * step) if bound else rate * softplus(step))
    correction = (value - (state * key[:, :, None]).sum(1)) * beta[:, None]
    state = state + key[:, :, None] * correction[:, None, :]
    return window, state, (state * query[:, :, None]).sum(1)


def _spread(heads: torch.Tensor, layer: GatedDeltaLayer) -> torch.Tensor:
    """Queries or keys [Hk * dk] of length one per head, for each value head: [Hv, dk]."""
    wide = heads.view(layer.num_key_heads, layer.key_dim)
    wide = wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + _NORM_EPS)
    return wide.repeat_interleave(layer.num_value_heads // layer.num_key_heads, dim=0)
