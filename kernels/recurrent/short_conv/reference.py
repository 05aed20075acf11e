"""The short convolution row by row, in plain torch: the oracle. Sums in fp32, rounded once to the model's dtype."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.reference import convolve, walk
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer


def short_conv(raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
    """See `arguments.ShortConv`."""

    def step(
        row: torch.Tensor, window: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        window, mixed = convolve(row, window, layer.weight, layer.bias)
        return window, state, mixed.to(raw.dtype)

    return walk(raw, states, rows, step)
