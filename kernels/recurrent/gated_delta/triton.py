"""The gated delta rule on an NVIDIA GPU: convolution, rows, state and norm in a launch each (triton)."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.triton import gated_norm
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.triton import mixed_rows
from outrider.kernels.recurrent.triton_outer_rows import DELTA, Columns
from outrider.kernels.recurrent.triton_outer_state import advance


def gated_delta(
    raw: torch.Tensor, gate: torch.Tensor, layer: GatedDeltaLayer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.GatedDelta`; raw is fp32 or bf16. Raises KernelArgumentError."""
    key_width, num_channels = layer.num_key_heads * layer.key_dim, layer.num_channels
    columns = Columns(0, key_width, 2 * key_width, beta=num_channels, step=num_channels + layer.num_value_heads)
    attended = advance(
        *(mixed_rows(raw, layer.conv, states, rows), columns, states, rows),
        rule=DELTA,
        num_key_heads=layer.num_key_heads,
        decay_rate=layer.decay_rate,
        beta_scale=layer.beta_scale,
        dt_bias=layer.dt_bias,
        query_scale=layer.key_dim**-0.5,
    )
    return gated_norm(attended, gate, layer.norm)
