"""Mamba-2 on an NVIDIA GPU: convolution, rows and state in a launch each (triton)."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.outer_rules import SELECTIVE
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.triton import mixed_rows
from outrider.kernels.recurrent.triton_outer_state import advance


def mamba2(raw: torch.Tensor, layer: Mamba2Layer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `arguments.Mamba2`; raw is fp32 or bf16. Raises KernelArgumentError."""
    return advance(
        *(mixed_rows(raw, layer.conv, states, rows), layer.columns, states, rows),
        rule=SELECTIVE,
        num_key_heads=layer.num_groups,
        decay_rate=layer.decay_rate,
        dt_bias=layer.wide_dt_bias,
        skip=layer.skip,
    )
