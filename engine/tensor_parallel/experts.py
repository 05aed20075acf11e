"""Cuts a mixture of experts: each rank keeps a range of every expert's inner features.

Routers stay whole: all ranks compute the same bits and choose the same experts. Not here: which modules are mixtures
(plan).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import WaitingExperts
from outrider.engine.model.row_invariant_experts import is_experts
from outrider.engine.tensor_parallel.plan import FIX


def num_inner_features(path: str, name: str, experts: Any) -> int:
    """Returns the width that is cut. Raises ModelRefused if cut_experts does not support the weights' layout."""
    if not is_experts(experts) or not experts.has_gate or experts.has_bias or experts.is_transposed:
        raise ModelRefused(path, f"{name} has biases, no gate or transposed weights", FIX)
    return int(experts.down_proj.shape[2])


def cut_experts(experts: Any, inner_range: tuple[int, int], uneven: set[str]) -> None:
    """Keeps inner features [start, end) of gate_up_proj [E, 2 I, H] and down_proj [E, H, I], in place.

    uneven: as in sharding.Cut.
    """
    start, end = inner_range
    experts.gate_up_proj = _keep_gate_up(experts.gate_up_proj, start, end)
    experts.down_proj = _keep_down(experts.down_proj, start, end, uneven)


def _keep_gate_up(stacked: torch.Tensor | WaitingExperts, start: int, end: int) -> torch.Tensor | WaitingExperts:
    num_experts, num_outputs, hidden_size = stacked.shape
    if isinstance(stacked, WaitingExperts):
        width = num_outputs // 2
        # An expert's gate and up are one weight, or two separate ones.
        of_gate_up = ((start, end), (width + start, width + end))
        parts = tuple(
            (weights[0].of_outputs(*of_gate_up),)
            if len(weights) == 1
            else tuple(weight.of_outputs((start, end)) for weight in weights)
            for weights in stacked.parts
        )
        return replace(stacked, shape=(num_experts, 2 * (end - start), hidden_size), parts=parts)
    kept = stacked.detach().view(num_experts, 2, num_outputs // 2, hidden_size)[:, :, start:end]
    return torch.nn.Parameter(kept.reshape(num_experts, -1, hidden_size), requires_grad=False)


def _keep_down(
    stacked: torch.Tensor | WaitingExperts, start: int, end: int, uneven: set[str]
) -> torch.Tensor | WaitingExperts:
    if isinstance(stacked, WaitingExperts):
        num_experts, hidden_size, _ = stacked.shape
        parts = tuple(tuple(weight.of_inputs(start, end, uneven) for weight in weights) for weights in stacked.parts)
        return replace(stacked, shape=(num_experts, hidden_size, end - start), parts=parts)
    kept = stacked.detach()[:, :, start:end]
    return torch.nn.Parameter(kept.clone(memory_format=torch.contiguous_format), requires_grad=False)
