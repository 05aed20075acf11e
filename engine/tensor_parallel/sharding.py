"""Cuts a loaded model to one rank's share, by transformers' tensor-parallel plan of the architecture.

"colwise" keeps a range of a linear's outputs, "rowwise" a range of its inputs; rowwise outputs are summed over ranks
(Megatron-LM, Shoeybi et al. 2019, section 3). Attention and KV cache are cut by KV head; shares may differ by one head.
Not here: reading the plan (plan), exchanges (collectives), checking the result (agreement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from outrider.engine.attention.ops import LayerShape
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import CodedLinear
from outrider.engine.model.lean.lean_attention import LeanAttention
from outrider.engine.model.lean.lean_mlp import LeanGatedMLP
from outrider.engine.tensor_parallel.collectives import Collectives, GatheredOutput, SummedOutput
from outrider.engine.tensor_parallel.experts import cut_experts, num_inner_features
from outrider.engine.tensor_parallel.plan import COLWISE, EXPERTS, FIX, HEAD, ROWWISE, read_plan

# features; largest unit that widths are cut at multiples of, for whole vectors and tiles
_MAX_UNIT = 64


@dataclass(frozen=True)
class Cut:
    """The names of modules whose outputs are summed over ranks, and of those whose outputs are concatenated.

    uneven: names of packed weights that are dequantised, since the cut leaves no groups that can be packed; known once
    they are packed.
    """

    summed: tuple[str, ...]
    gathered: tuple[str, ...]
    uneven: set[str]


def share(num_units: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the half-open range of a rank's units; the first ranks take the remainder, so rank 0's is the largest."""
    each, over = divmod(num_units, size)
    start = rank * each + min(rank, over)
    return start, start + each + (rank < over)


def cut_model(path: str, model: torch.nn.Module, layer_shapes: Sequence[LayerShape], rank: int, size: int) -> Cut:
    """Keeps one rank's share of the weights, in place; the linears stay plain or coded ones, without exchanges.

    layer_shapes: of the whole model. Raises ModelRefused if there is no plan, or an unsupported one.
    """
    plan = read_plan(path, model)
    uneven: set[str] = set()
    attentions = {shape.module_name: shape.num_kv_heads for shape in layer_shapes}
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style == EXPERTS:
            num_features = num_inner_features(path, name, module)
        elif _can_be_cut(module):
            num_features = module.out_features if style == COLWISE else module.in_features
        else:
            raise ModelRefused(path, f"its plan cuts {name}, a {type(module).__name__}, which is no plain linear", FIX)
        num_units = _num_units(path, name, num_features, attentions, size)
        start, end = (edge * (num_features // num_units) for edge in share(num_units, rank, size))
        if style == EXPERTS:
            cut_experts(module, (start, end), uneven)
        elif style == COLWISE:
            _keep_outputs(module, start, end)
        else:
            _keep_inputs(module, start, end, uneven, with_bias=rank == 0)
    gathered = (HEAD,) if _cut_head(model, rank, size) else ()
    return Cut(tuple(name for name, style in plan.items() if style in (ROWWISE, EXPERTS)), gathered, uneven)


def connect(model: torch.nn.Module, cut: Cut, collectives: Collectives) -> None:
    """Inserts the exchanges, after make_lean: lean modules have the summed linear under another name."""
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
    """Returns the number of equal, indivisible parts of the features: KV heads, or vectors of an MLP."""
    num_kv_heads = next((heads for module, heads in attentions.items() if name.startswith(module + ".")), None)
    if num_kv_heads is not None:
        if num_kv_heads < size or num_features % num_kv_heads:
            cause = f"{name} has {num_features} features of {num_kv_heads} KV heads, which {size} ranks cannot share"
            raise ModelRefused(path, cause, f"use tensor_parallel_size={num_kv_heads} or less")
        return num_kv_heads
    unit = min(_MAX_UNIT, num_features & -num_features)  # the largest power of two that divides them
    while unit > 1 and num_features // unit < size:
        unit //= 2
    if num_features // unit < size:
        raise ModelRefused(path, f"{name} has {num_features} features, which {size} ranks cannot share", FIX)
    return num_features // unit


def _cut_head(model: torch.nn.Module, rank: int, size: int) -> bool:
    """Cuts the head too if its parts are of equal size, as gathering requires; returns whether it was cut."""
    head = model._modules.get(HEAD)
    if not _can_be_cut(head) or head.out_features % size:
        return False
    _keep_outputs(head, *share(head.out_features, rank, size))
    return True


def _can_be_cut(module: object) -> TypeGuard[torch.nn.Linear | CodedLinear]:
    return type(module) is torch.nn.Linear or isinstance(module, CodedLinear)


def _keep_outputs(linear: torch.nn.Module, start: int, end: int) -> None:
    if isinstance(linear, CodedLinear):
        linear.keep_outputs(start, end)
        return
    weight, bias = _tensors(linear)
    linear.weight = _frozen(weight[start:end])
    linear.out_features = end - start  # type: ignore[assignment]
    if bias is not None:
        linear.bias = _frozen(bias[start:end])


def _keep_inputs(linear: torch.nn.Module, start: int, end: int, uneven: set[str], *, with_bias: bool) -> None:
    """Keeps a range of inputs. The bias is part of rank 0's share only: it must enter the sum once."""
    if isinstance(linear, CodedLinear):
        linear.keep_inputs(start, end, uneven)
    else:
        weight, _bias = _tensors(linear)
        linear.weight = _frozen(weight[:, start:end])
        linear.in_features = end - start  # type: ignore[assignment]
    if not with_bias:
        linear.bias = None  # type: ignore[assignment]


def _tensors(linear: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = linear._parameters["weight"], linear._parameters["bias"]
    return weight.detach(), None if bias is None else bias.detach()  # type: ignore[union-attr]


def _frozen(part: torch.Tensor) -> torch.nn.Parameter:
    # A copy: a view would keep the whole weight alive.
    return torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
