"""The gated norm row by row, in plain torch: the oracle. Everything between the roundings is fp32."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.reference import sigmoid


def gated_norm(x: torch.Tensor, gate: torch.Tensor, layer: GatedNormLayer) -> torch.Tensor:
    """See `arguments.GatedNorm`."""
    return torch.stack([_row(*row, layer) for row in zip(x, gate, strict=True)]) if len(x) else torch.empty_like(x)


def _row(x: torch.Tensor, gate: torch.Tensor, layer: GatedNormLayer) -> torch.Tensor:
    wide_gate = gate.float()
    active = sigmoid(wide_gate)
    if layer.activation == "silu":
        active = wide_gate * active
    wide = x.float() * active if layer.gates_first else x.float()
    groups = wide.view(-1, layer.group_size)
    groups = groups * torch.rsqrt(groups.pow(2).mean(1, keepdim=True) + layer.eps)
    if layer.rounds_first:
        groups = groups.to(x.dtype)
    weight = layer.weight if layer.rounds_first else layer.weight.float()
    weighted = (groups * weight.view(-1, layer.group_size)).flatten()
    if not layer.gates_first:
        weighted = weighted.float() * active
    return weighted.to(x.dtype)
