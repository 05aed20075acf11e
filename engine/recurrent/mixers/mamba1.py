"""Mamba-1's mixer, in place of transformers' (Mamba, Falcon Mamba, Jamba).

Not here: the recurrence (kernels/recurrent/mamba1), which modules are replaced (adapt).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider.engine.model.row_invariant_modules import apply_in_whole_vectors
from outrider.engine.recurrent.kernels import RecurrentKernels
from outrider.engine.recurrent.mixers.mixer import RecurrentMixer, convolution, require_silu
from outrider.engine.recurrent.states import RecurrentShape
from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer


class Mamba1Mixer(RecurrentMixer):
    """Mamba-1's mixer; its input projection makes [x | gate]."""

    def __init__(self, original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> None:
        """Takes the parts of original; Jamba and Falcon Mamba have norms of time steps, B and C, Mamba has none."""
        require_silu(original)
        dtype, decay_rate = original.dt_proj.weight.dtype, -original.A_log.detach().float().exp()
        layer = Mamba1Layer(
            conv=ShortConvLayer(*convolution(original.conv1d)),
            decay_rate=decay_rate.t().contiguous(),
            dt_bias=original.dt_proj.bias.detach().to(dtype).float(),
            skip=original.D.detach().float(),
        )
        num_channels, num_taps = layer.conv.weight.shape
        shape = RecurrentShape(
            module_name=name,
            num_window_rows=num_taps - 1,
            num_channels=num_channels,
            state_shape=(1, *layer.decay_rate.shape),
            log_width=num_channels,
        )
        super().__init__(shape, state_idx, original.in_proj.in_features)
        self.layer = layer
        self.in_proj, self.x_proj, self.out_proj = original.in_proj, original.x_proj, original.out_proj
        # The bias is added in the kernel.
        weight = original.dt_proj.weight.detach()
        self.dt_proj = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.dt_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
        self.norms = torch.nn.ModuleList([getattr(original, norm, torch.nn.Identity()) for norm in norms])
        self._kernel = kernels.mamba1

    def mix(self, hidden_states: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        """See RecurrentMixer."""
        raw, gate = self.in_proj(hidden_states).chunk(2, dim=1)
        outputs = self._kernel(raw, self._project, self.layer, states, rows)
        mixed: torch.Tensor = self.out_proj(outputs * apply_in_whole_vectors(functional.silu, gate))
        return mixed

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns time steps, B and C."""
        state_size, rank = self.layer.decay_rate.shape[0], self.dt_proj.in_features
        parts = torch.split(self.x_proj(x), [rank, state_size, state_size], dim=1)
        dt, b, c = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        return self.dt_proj(dt), b, c
