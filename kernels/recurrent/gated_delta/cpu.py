"""The gated delta rule on the CPU: convolution, state and norm in a call each. Needs numba."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.cpu_outer_state import advance
from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.cpu import gated_norm
from outrider.kernels.recurrent.outer_rules import DELTA
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.cpu import mixed_rows


def gated_delta(
    raw: torch.Tensor, gate: torch.Tensor, layer: GatedDeltaLayer, states: LayerStates, rows: RecurrentRows
) -> torch.Tensor:
    """See `arguments.GatedDelta`; raw is fp32 or bf16. Raises KernelArgumentError."""
    attended = advance(
        *(mixed_rows(raw, layer.conv, states, rows), layer.columns, states, rows),
        rule=DELTA,
        dtype=raw.dtype,
        num_key_heads=layer.num_key_heads,
        decay_rate=layer.decay_rate,
        beta_scale=layer.beta_scale,
        dt_bias=layer.dt_bias,
        query_scale=layer.key_dim**-0.5,
    )
    return gated_norm(attended, gate, layer.norm)
