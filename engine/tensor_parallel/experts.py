"""Cutting a mixture of experts: each rank keeps a range of every expert's inner features.

Routers stay whole: all ranks compute the same bits and choose the same experts. Not here: which modules are mixtures
(plan).
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.errors import ModelRefused
from outrider.engine.model.row_invariant_experts import is_experts
from outrider.engine.tensor_parallel.plan import FIX


def num_inner_features(path: str, name: str, experts: Any) -> int:
    """The width that is cut. Raises ModelRefused if cut_experts does not support the weights' layout."""
    if not is_experts(experts) or not experts.has_gate or experts.has_bias or experts.is_transposed:
        raise ModelRefused(path, f"{name} has biases, no gate or transposed weights", FIX)
    return int(experts.down_proj.shape[2])


def cut_experts(experts: Any, inner_range: tuple[int, int]) -> None:
    """Keep inner features [start, end) of gate_up_proj [E, 2 I, H] and down_proj [E, H, I], in place."""
    start, end = inner_range
    num_experts, num_outputs, hidden_size = experts.gate_up_proj.shape
    gate_up = experts.gate_up_proj.detach().view(num_experts, 2, num_outputs // 2, hidden_size)[:, :, start:end]
    down = experts.down_proj.detach()[:, :, start:end]
    experts.gate_up_proj = torch.nn.Parameter(gate_up.reshape(num_experts, -1, hidden_size), requires_grad=False)
    experts.down_proj = torch.nn.Parameter(down.clone(memory_format=torch.contiguous_format), requires_grad=False)
