"""Mamba-2's mixer, in place of transformers' (Mamba-2, Zamba2, Bamba, Nemotron-H, Granite 4, Falcon-H1).

Not here: the recurrence (kernels/recurrent/mamba2), which modules are replaced (adapt).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider.engine.model.row_invariant_modules import apply_in_whole_vectors
from outrider.engine.recurrent.kernels import RecurrentKernels
from outrider.engine.recurrent.mixers.mixer import RecurrentMixer, convolution, require_silu
from outrider.engine.recurrent.states import RecurrentShape
from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer


class Mamba2Mixer(RecurrentMixer):
    """Mamba-2's mixer; its input projection makes [gate | x | B | C | dt]."""

    def __init__(
        self,
        original: Any,
        name: str,
        state_idx: int,
        kernels: RecurrentKernels,
        norm: GatedNormLayer | None,
        input_multiplier: float = 1.0,
        projection_multipliers: torch.Tensor | None = None,
    ) -> None:
        """Takes the parts of original, one of transformers' Mamba-2 mixers.

        norm: None if the gate alone multiplies the outputs. projection_multipliers [gate + raw width], in the model's
        dtype.
        """
        require_silu(original)
        layer = Mamba2Layer(
            num_heads=original.num_heads,
            head_dim=original.head_dim,
            num_groups=original.n_groups,
            state_size=original.ssm_state_size,
            conv=ShortConvLayer(*convolution(original.conv1d)),
            decay_rate=-original.A_log.detach().float().exp(),
            dt_bias=original.dt_bias.detach(),
            skip=original.D.detach().float(),
        )
        num_channels, num_taps = layer.conv.weight.shape
        shape = RecurrentShape(
            module_name=name,
            num_window_rows=num_taps - 1,
            num_channels=num_channels,
            state_shape=(layer.num_heads, layer.state_size, layer.head_dim),
            log_width=num_channels + layer.num_heads,
        )
        super().__init__(shape, state_idx, original.in_proj.in_features)
        self.layer = layer
        self.norm = norm
        self.in_proj = original.in_proj
        self.out_proj = original.out_proj
        self.input_multiplier = input_multiplier
        self.projection_multipliers = projection_multipliers
        self._mamba2, self._gated_norm = kernels.mamba2, kernels.gated_norm

    def mix(self, hidden_states: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        """See RecurrentMixer."""
        if self.input_multiplier != 1.0:
            hidden_states = hidden_states * self.input_multiplier
        projected: torch.Tensor = self.in_proj(hidden_states)
        if self.projection_multipliers is not None:
            projected = projected * self.projection_multipliers
        gate = projected[:, : -self.shape.log_width]
        outputs = self._mamba2(projected[:, -self.shape.log_width :], self.layer, states, rows)
        if self.norm is None:
            outputs = outputs * apply_in_whole_vectors(functional.silu, gate)
        else:
            outputs = self._gated_norm(outputs, gate, self.norm)
        mixed: torch.Tensor = self.out_proj(outputs)
        return mixed


def from_plain(original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> Mamba2Mixer:
    """Builds the mixer of all but Falcon-H1: a norm after the gate rounds before its weight."""
    norm = GatedNormLayer(
        original.norm.weight.detach(),
        original.norm.group_size,
        original.norm.variance_epsilon,
        gates_first=True,
        rounds_first=True,
    )
    return Mamba2Mixer(original, name, state_idx, kernels, norm)


def from_falcon_h1(original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> Mamba2Mixer:
    """Builds Falcon-H1's mixer: multipliers before and after the input projection, and a norm of its own or none."""
    norm = None
    if original.mamba_rms_norm:
        norm = GatedNormLayer(
            original.norm.weight.detach(),
            original.intermediate_size // original.norm.n_groups,
            original.norm.variance_epsilon,
            gates_first=not original.norm.norm_before_gate,
            rounds_first=False,
        )
    multipliers = original.mup_vector.detach()[0, 0].to(original.conv1d.weight.dtype)
    return Mamba2Mixer(original, name, state_idx, kernels, norm, float(original.ssm_in_multiplier), multipliers)
