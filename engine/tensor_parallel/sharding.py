"""Cutting a loaded model into one rank's share, by the plan that transformers ships with the architecture.

Not here: reading the plan (plan), exchanging (collectives), checking that the shares compute what the whole did
(agreement). "colwise" keeps a range of a linear's outputs, "rowwise" a range of its inputs, and rowwise outputs are
summed over ranks (Megatron-LM, Shoeybi et al. 2019, section 3). Attention is cut between groups of heads that share a
KV head, so the KV cache is cut with it; shares may differ by one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import ModelRefused
from engine.lean_attention import LeanAttention
from engine.lean_mlp import LeanGatedMLP
from engine.paged_kv import LayerShape
from engine.tensor_parallel.collectives import Collectives, GatheredOutput, SummedOutput
from engine.tensor_parallel.experts import cut_experts, num_inner_features
from engine.tensor_parallel.plan import COLWISE, EXPERTS, FIX, HEAD, ROWWISE, read_plan

# Widths are cut at multiples of this where they can be: whole vectors and tiles for the kernels.
_WIDEST_UNIT = 64


@dataclass(frozen=True)
class Cut:
    """Names of modules whose outputs are to be summed, and of those to be put side by side."""

    summed: tuple[str, ...]
    gathered: tuple[str, ...]


def share(num_units: int, rank: int, size: int) -> tuple[int, int]:
    """The half-open range of units of a rank; the first ranks take what is over, so rank 0's share is the largest."""
    each, over = divmod(num_units, size)
    start = rank * each + min(rank, over)
    return start, start + each + (rank < over)


def cut_model(path: str, model: torch.nn.Module, layer_shapes: Sequence[LayerShape], rank: int, size: int) -> Cut:
    """Keeps one rank's share of the weights, in place; the linears stay plain ones, and nothing is exchanged yet.

    layer_shapes: of the whole model. Raises ModelRefused where there is no plan or a part of it is not understood.
    """
    plan = read_plan(path, model)
    attentions = {shape.module_name: shape.num_kv_heads for shape in layer_shapes}
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style == EXPERTS:
            num_features = num_inner_features(path, name, module)
        elif type(module) is torch.nn.Linear:
            num_features = module.out_features if style == COLWISE else module.in_features
        else:
            raise ModelRefused(path, f"its plan cuts {name}, a {type(module).__name__}, which is no plain linear", FIX)
        num_units = _num_units(path, name, num_features, attentions, size)
        start, end = (edge * (num_features // num_units) for edge in share(num_units, rank, size))
        if style == EXPERTS:
            cut_experts(module, (start, end))
        elif style == COLWISE:
            _keep_outputs(module, start, end)
        else:
            _keep_inputs(module, start, end, with_bias=rank == 0)
    gathered = (HEAD,) if _cut_head(model, rank, size) else ()
    return Cut(tuple(name for name, style in plan.items() if style in (ROWWISE, EXPERTS)), gathered)


def connect(model: torch.nn.Module, cut: Cut, collectives: Collectives) -> None:
    """Puts the exchanges in, after make_lean: a lean stand-in has the linear that is summed under its own name."""
    for name in cut.gathered:
        parent, child = _parent(model, name)
        setattr(parent, child, GatheredOutput(parent.get_submodule(child), collectives))
    for name in cut.summed:
        parent, child = _parent(model, name)
        if isinstance(parent, LeanAttention):
            child = "out"
        elif isinstance(parent, LeanGatedMLP):
            child = "down"
        setattr(parent, child, SummedOutput(parent.get_submodule(child), collectives))


def _parent(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    parent_name, _, child = name.rpartition(".")
    return model.get_submodule(parent_name), child


def _num_units(path: str, name: str, num_features: int, attentions: dict[str, int], size: int) -> int:
    """Into how many equal parts, none of which may be cut again, features fall: KV heads, or vectors of an MLP."""
    num_kv_heads = next((heads for module, heads in attentions.items() if name.startswith(module + ".")), None)
    if num_kv_heads is not None:
        if num_kv_heads < size or num_features % num_kv_heads:
            cause = f"{name} has {num_features} features of {num_kv_heads} KV heads, which {size} ranks cannot share"
            raise ModelRefused(path, cause, f"use tensor_parallel_size={num_kv_heads} or less")
        return num_kv_heads
    unit = min(_WIDEST_UNIT, num_features & -num_features)  # the largest power of two that divides them
    while unit > 1 and num_features // unit < size:
        unit //= 2
    if num_features // unit < size:
        raise ModelRefused(path, f"{name} has {num_features} features, which {size} ranks cannot share", FIX)
    return num_features // unit


def _cut_head(model: torch.nn.Module, rank: int, size: int) -> bool:
    """The head too, where its parts are all alike: only such can be put side by side."""
    head = model._modules.get(HEAD)
    if type(head) is not torch.nn.Linear or head.out_features % size:
        return False
    _keep_outputs(head, *share(head.out_features, rank, size))
    return True


def _keep_outputs(linear: torch.nn.Module, start: int, end: int) -> None:
    weight, bias = _tensors(linear)
    linear.weight = _frozen(weight[start:end])
    linear.out_features = end - start  # type: ignore[assignment]
    if bias is not None:
        linear.bias = _frozen(bias[start:end])


def _keep_inputs(linear: torch.nn.Module, start: int, end: int, *, with_bias: bool) -> None:
    """The bias goes into the sum once: with rank 0's share."""
    weight, _bias = _tensors(linear)
    linear.weight = _frozen(weight[:, start:end])
    linear.in_features = end - start  # type: ignore[assignment]
    if not with_bias:
        linear.register_parameter("bias", None)


def _tensors(linear: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = linear._parameters["weight"], linear._parameters["bias"]
    return weight.detach(), None if bias is None else bias.detach()  # type: ignore[union-attr]


def _frozen(part: torch.Tensor) -> torch.nn.Parameter:
    # A copy: a view would keep the whole weight alive.
    return torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
