"""The short convolution's mixer, in place of transformers' (LFM2).

Not here: the convolution (kernels/recurrent/short_conv), which modules are replaced (adapt).
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.recurrent.kernels import RecurrentKernels
from outrider.engine.recurrent.mixers.mixer import RecurrentMixer, convolution
from outrider.engine.recurrent.states import RecurrentShape
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer


class ShortConvMixer(RecurrentMixer):
    """Computes c * conv(b * x), with b, c and x from one input projection. Its state is the convolution's window."""

    def __init__(self, original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> None:
        """Takes the parts of original, one of transformers' Lfm2ShortConvs."""
        layer = ShortConvLayer(*convolution(original.conv))
        num_channels, num_taps = layer.weight.shape
        shape = RecurrentShape(
            module_name=name,
            num_window_rows=num_taps - 1,
            num_channels=num_channels,
            state_shape=(0,),
            log_width=num_channels,
        )
        super().__init__(shape, state_idx, original.in_proj.in_features)
        self.layer = layer
        self.in_proj = original.in_proj
        self.out_proj = original.out_proj
        self._kernel = kernels.short_conv

    def mix(self, hidden_states: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        """See RecurrentMixer."""
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=1)
        mixed: torch.Tensor = self.out_proj(c * self._kernel(b * x, self.layer, states, rows))
        return mixed
