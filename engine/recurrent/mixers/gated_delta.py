"""The gated delta rule's mixer, in place of transformers' (Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, Ling 3.0).

Not here: the recurrence (kernels/recurrent/gated_delta), which modules are replaced (adapt).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.engine.model.coded_weights import CodedLinear
from outrider.engine.recurrent.kernels import RecurrentKernels
from outrider.engine.recurrent.mixers.mixer import RecurrentMixer, convolution, require_silu
from outrider.engine.recurrent.states import RecurrentShape
from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows


class GatedDeltaMixer(RecurrentMixer):
    """Mixes raw rows [q | k | v | b | a] and gates from projections of our own; value heads are in order."""

    def __init__(
        self,
        name: str,
        state_idx: int,
        kernels: RecurrentKernels,
        layer: GatedDeltaLayer,
        raw_projections: Sequence[torch.nn.Module],
        gate_projection: torch.nn.Module,
        out_projection: torch.nn.Module,
    ) -> None:
        """Takes the layer and its projections. raw_projections: their outputs are joined; the first is a linear."""
        num_channels, num_taps = layer.conv_weight.shape
        shape = RecurrentShape(
            module_name=name,
            num_window_rows=num_taps - 1,
            num_channels=num_channels,
            state_shape=(layer.num_value_heads, layer.key_dim, layer.value_dim),
            log_width=layer.raw_width,
        )
        super().__init__(shape, state_idx, int(raw_projections[0].in_features))  # type: ignore[arg-type]
        self.layer = layer
        self.in_proj_raw = torch.nn.ModuleList(raw_projections)
        self.in_proj_gate = gate_projection
        self.out_proj = out_projection
        self._kernel = kernels.gated_delta

    def mix(self, hidden_states: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        """See RecurrentMixer."""
        parts = [projection(hidden_states) for projection in self.in_proj_raw]
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        attended: torch.Tensor = self.out_proj(
            self._kernel(raw, self.in_proj_gate(hidden_states), self.layer, states, rows)
        )
        return attended


def from_separate(original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> GatedDeltaMixer:
    """Builds Qwen3.5's mixer: one projection for q, k and v, and one each for gates, b and a."""
    raw = _joined(original.in_proj_qkv, original.in_proj_b, original.in_proj_a)
    layer = _layer(original, original.norm)
    return GatedDeltaMixer(name, state_idx, kernels, layer, [raw], original.in_proj_z, original.out_proj)


def from_interleaved(original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> GatedDeltaMixer:
    """Builds Qwen3-Next's mixer from its two interleaved projections.

    One has, per key head, its q, k, its value heads' v and their gates; the other, per key head, its value heads' b and
    a. Value heads are numbered by key head, so rows that are sorted by kind are in order.
    """
    num_key_heads, group = original.num_k_heads, original.num_v_heads // original.num_k_heads
    key_dim, value_width = original.head_k_dim, group * original.head_v_dim
    wide = torch.unflatten(_weight(original.in_proj_qkvz), 0, (num_key_heads, -1))
    narrow = torch.unflatten(_weight(original.in_proj_ba), 0, (num_key_heads, -1))
    query, key, value, gate = torch.split(wide, [key_dim, key_dim, value_width, value_width], dim=1)
    b, a = torch.split(narrow, [group, group], dim=1)
    raw = _linear(torch.cat([part.flatten(0, 1) for part in (query, key, value, b, a)]))
    gates = _linear(gate.flatten(0, 1).contiguous())
    layer = _layer(original, original.norm)
    return GatedDeltaMixer(name, state_idx, kernels, layer, [raw], gates, original.out_proj)


def from_olmo(original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> GatedDeltaMixer:
    """Builds OLMo hybrid's mixer: a projection for each part, and beta up to 2."""
    parts = (original.q_proj, original.k_proj, original.v_proj, original.b_proj, original.a_proj)
    layer = _layer(original, original.o_norm, beta_scale=2.0 if original.allow_neg_eigval else 1.0)
    return GatedDeltaMixer(name, state_idx, kernels, layer, [_joined(*parts)], original.g_proj, original.o_proj)


def from_kimi(original: Any, name: str, state_idx: int, kernels: RecurrentKernels) -> GatedDeltaMixer:
    """Builds Kimi Linear's mixer: a decay per key element, and narrow projections before those of decays and gates.

    Ling's has plain projections, and may bound its decays.
    """
    require_silu(original)
    forget = original.forget_gate
    is_plain = hasattr(forget, "f_proj")
    layer = GatedDeltaLayer(
        *(original.num_heads, original.num_heads, original.head_dim, original.head_dim),
        conv_weight=_convolution(original),
        decay_rate=-forget.A_log.detach().float().exp().flatten(),
        dt_bias=forget.dt_bias.detach().float(),
        norm=GatedNormLayer(
            original.o_norm.weight.detach(),
            original.head_dim,
            original.o_norm.variance_epsilon,
            gates_first=False,
            rounds_first=False,
            activation=original.o_norm.activation,
        ),
        decay_bound=float(forget.lower_bound) if getattr(forget, "safe_gate", False) else 0.0,
    )
    raw = _joined(original.q_proj, original.k_proj, original.v_proj, original.b_proj)
    decays = forget.f_proj if is_plain else torch.nn.Sequential(forget.f_a_proj, forget.f_b_proj)
    gates = original.g_proj if is_plain else torch.nn.Sequential(original.g_a_proj, original.g_b_proj)
    return GatedDeltaMixer(name, state_idx, kernels, layer, [raw, decays], gates, original.o_proj)


def _layer(original: Any, norm: Any, beta_scale: float = 1.0) -> GatedDeltaLayer:
    """Builds the layer of a GatedDeltaNet of Qwen's or OLMo's."""
    require_silu(original)
    return GatedDeltaLayer(
        num_key_heads=original.num_k_heads,
        num_value_heads=original.num_v_heads,
        key_dim=original.head_k_dim,
        value_dim=original.head_v_dim,
        conv_weight=_convolution(original),
        decay_rate=-original.A_log.detach().float().exp(),
        dt_bias=original.dt_bias.detach().float(),
        norm=GatedNormLayer(
            norm.weight.detach(), original.head_v_dim, norm.variance_epsilon, gates_first=False, rounds_first=True
        ),
        beta_scale=beta_scale,
    )


def _convolution(original: Any) -> torch.Tensor:
    weight, bias = convolution(original.conv1d)
    if bias is not None:
        raise ValueError("its convolution has a bias")
    return weight


def _joined(*linears: Any) -> torch.nn.Linear:
    return _linear(torch.cat([_weight(linear) for linear in linears]))


def _weight(linear: Any) -> torch.Tensor:
    """Returns a linear's weight, dequantised: codes of different linears, or of their rows, are not joined here."""
    if linear.bias is not None:
        raise ValueError("its input projection has a bias")
    plain = linear.plain(torch.bfloat16) if isinstance(linear, CodedLinear) else linear
    weight: torch.Tensor = plain.weight.detach()
    return weight


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear
