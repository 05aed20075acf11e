"""Cutting a mixture of experts: every rank keeps a range of the inner features of every expert.

Not here: which modules are mixtures (plan). Routers stay whole: each rank chooses the same experts, because it
computes the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import ModelRefused
from engine.row_invariant_experts import is_experts
from engine.tensor_parallel.plan import FIX


def num_inner_features(path: str, name: str, experts: Any) -> int:
    """The width that is cut. Raises ModelRefused where the weights do not lie as cut_experts takes them."""
    if not is_experts(experts) or not experts.has_gate or experts.has_bias or experts.is_transposed:
        raise ModelRefused(path, f"{name} has biases, no gate or transposed weights", FIX)
    return int(experts.down_proj.shape[2])


def cut_experts(experts: Any, inner_range: tuple[int, int]) -> None:
    """Keeps inner features [start, end) of gate_up_proj [E, 2 I, H] and down_proj [E, H, I], in place."""
    start, end = inner_range
    num_experts, num_outputs, hidden_size = experts.gate_up_proj.shape
    gate_up = experts.gate_up_proj.detach().view(num_experts, 2, num_outputs // 2, hidden_size)[:, :, start:end]
    down = experts.down_proj.detach()[:, :, start:end]
    experts.gate_up_proj = torch.nn.Parameter(gate_up.reshape(num_experts, -1, hidden_size), requires_grad=False)
    experts.down_proj = torch.nn.Parameter(down.clone(memory_format=torch.contiguous_format), requires_grad=False)
