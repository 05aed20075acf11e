"""Row-invariant mixtures of experts, behind transformers' experts interface.

In transformers' own functions a token's bits depend on how many tokens of the batch chose the same expert. Here each
expert's linears are row-invariant, and a token's outputs are summed in the order of its top-k, in fp32.
Not here: routers (row_invariant_modules.RowInvariantWeight), finding quantised experts in a checkpoint (coded_experts).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from outrider.engine.errors import RowInvarianceError
from outrider.engine.model.coded_weights import WaitingExperts, pack_codes
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.shared.machine.memory import give_back_freed_memory

EXPERTS_NAME = "outrider_experts"
PACKED = "outrider_packed_experts"  # the attribute with the packed experts
# transformers' experts that hold weights and a gate as its interface has them, but are not behind it.
_OUTSIDE_INTERFACE = ("Step3p7Experts",)
_MAX_TILE_ELEMENTS = 16_384  # elements; torch splits larger elementwise ranges over threads


class PackedExpert(torch.nn.Module):
    def __init__(self, up: RowInvariantLinear, down: RowInvariantLinear) -> None:
        """Takes the expert's two linears.

        up: hidden -> intermediate (gate and up concatenated if the model gates); down: intermediate -> hidden.
        """
        super().__init__()
        self.up, self.down = up, down


def register_experts() -> None:
    """Registers EXPERTS_NAME with transformers. Safe to call again."""
    ExpertsInterface.register(EXPERTS_NAME, experts_forward)


def is_experts(module: torch.nn.Module) -> bool:
    """Returns whether transformers dispatches this module through its experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "down_proj"))


def put_behind_interface(module: torch.nn.Module) -> None:
    """Makes experts outside transformers' interface look as if they were behind it; leaves other modules alone."""
    if type(module).__name__ in _OUTSIDE_INTERFACE and not is_experts(module):
        experts: Any = module
        experts.has_gate = True
        experts.has_bias = experts.is_transposed = experts.has_post_expert_norm = False
        experts.forward = partial(experts_forward, experts)


def weight_names(experts: Any) -> tuple[str, str]:
    """Returns the names of its two parameters [E, N, K] (or [E, K, N])."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def has_waiting_weights(experts: Any) -> bool:
    """Returns whether some of its weights are quantised and not packed yet."""
    return any(isinstance(getattr(experts, name, None), WaitingExperts) for name in weight_names(experts))


def pack_experts(experts: Any, backend: str = "cpu") -> None:
    """Packs all experts' weights and frees the plain ones.

    Quantised ones are read expert by expert. Raises ModelRefused.
    """
    if getattr(experts, "_is_expert_parallel", False):
        raise RowInvarianceError("expert parallelism is not supported")
    names = weight_names(experts)
    linears = (_linears(experts, name, backend) for name in names)
    packed = [PackedExpert(up, down) for up, down in zip(*linears, strict=True)]
    setattr(experts, PACKED, torch.nn.ModuleList(packed))
    for name in names:
        delattr(experts, name)
    give_back_freed_memory()  # else it grows from layer to layer: 412 MB for 221 MB of packed experts, not 279


def _linears(experts: Any, name: str, backend: str) -> Iterator[RowInvariantLinear]:
    """Yields each expert's linear in order."""
    stacked = getattr(experts, name)
    biases = list(getattr(experts, f"{name}_bias").detach()) if experts.has_bias else [None] * stacked.shape[0]
    if isinstance(stacked, WaitingExperts):
        for parts, bias in zip(stacked.parts, biases, strict=True):
            yield pack_codes([part.codes() for part in parts], bias, stacked.kernels)
    else:
        for weight, bias in zip(stacked.detach(), biases, strict=True):
            yield RowInvariantLinear(weight.t() if experts.is_transposed else weight, bias, backend)


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Maps hidden_states [T, H], top_k_index int64 [T, k], top_k_weights [T, k] -> [T, H]."""
    packed: Any = getattr(experts, PACKED, None)
    if packed is None and has_waiting_weights(experts):
        return torch.zeros_like(hidden_states)  # as CodedLinear
    if packed is None:  # the probe forward before packing, or a model loaded with row_invariant=False
        from transformers.integrations.moe import batched_mm_experts_forward

        return batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    outputs = hidden_states.new_empty((*top_k_index.shape, hidden_states.shape[-1]))
    for expert_id in torch.unique(top_k_index).tolist():
        token_rows, ranks = torch.where(top_k_index == expert_id)
        expert = packed[expert_id]
        with torch._C.DisableTorchFunction():  # for row_invariant_functions there is nothing left to do
            gated = _apply_gate(experts, expert.up(hidden_states[token_rows]))
        down = expert.down(gated)
        if experts.has_post_expert_norm:
            down = experts.post_expert_norm(down)
        outputs[token_rows, ranks] = (down * top_k_weights[token_rows, ranks, None]).to(outputs.dtype)
    # Sequential additions, not sum(): the order must not depend on the shape.
    total = outputs[:, 0].float()
    for rank in range(1, outputs.shape[1]):
        total = total + outputs[:, rank].float()
    return total.to(hidden_states.dtype)


def _apply_gate(experts: Any, up: torch.Tensor) -> torch.Tensor:
    """Applies the model's own gating, in tiles of rows that fill whole vectors, since gpt-oss calls torch.sigmoid
    itself (see row_invariant_modules.RowInvariantActivation)."""
    if not experts.has_gate:
        return experts.act_fn(up)  # type: ignore[no-any-return]
    width = up.shape[1] // 2
    unit = 64 // math.gcd(64, width)
    tile = unit * max(1, _MAX_TILE_ELEMENTS // (unit * width))
    if up.shape[0] > tile:
        return torch.cat([_apply_gate(experts, rows) for rows in torch.split(up, tile)])
    missing = -up.shape[0] % unit
    if missing == 0:
        return experts._apply_gate(up)  # type: ignore[no-any-return]
    filled = torch.cat([up, up.new_zeros((missing, up.shape[1]))])
    return experts._apply_gate(filled)[: up.shape[0]]  # type: ignore[no-any-return]
