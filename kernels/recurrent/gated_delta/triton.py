"""The gated delta rule on an NVIDIA GPU: convolution, rows, state and norm in a launch each (triton)."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.triton import gated_norm
from outrider.kernels.recurrent.outer_rules import DELTA
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.triton import mixed_rows
from outrider.kernels.recurrent.triton_outer_state import advance


def gated_delta(
    raw: torch.Tensor, gate: torch.Tensor, layer: GatedDeltaLayer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.GatedDelta`; raw is fp32 or bf16. Raises KernelArgumentError."""
    attended = advance(
        *(mixed_rows(raw, layer.conv, states, rows), layer.columns, states, rows),
        rule=DELTA,
        num_key_heads=layer.num_key_heads,
        decay_rate=layer.decay_rate,
        beta_scale=layer.beta_scale,
        dt_bias=layer.dt_bias,
        query_scale=layer.key_dim**-0.5,
    )
    return gated_norm(attended, gate, layer.norm)
