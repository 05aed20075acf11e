"""Fewer and larger operations per layer: a model's own norms, MLPs and attention modules give way to lean stand-ins.

No model code is copied and no architecture is known by name. A stand-in is put in only where it computes, on random
data in fp32 and with disturbed norms and biases, what the module that it replaces computes (lean_check); everything
else stays as transformers wrote it, and the report says how much that is.
Runs before make_row_invariant, which takes care of what is left; the certificate has the last word on both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine import lean_attention, lean_check
from engine.attention import AttentionOps, AttentionProbe, PagedContext
from engine.lean_attention import ModuleCall
from engine.lean_mlp import build as build_mlp
from engine.lean_mlp import find_activation
from engine.lean_norm import lean_norm
from engine.lean_rotary import lean_rotary
from engine.paged_kv import LayerShape
from engine.row_kernels import RowKernels, resolve_row_kernels


@dataclass(frozen=True)
class LeanReport:
    """How many modules gave way, and which classes of norms, MLPs and attention stayed (class name -> how many)."""

    num_norms: int
    num_mlps: int
    num_attentions: int
    num_rotary_embeddings: int
    left_out: dict[str, int]

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the model's own is left between the linears."""
        return self.num_attentions > 0 and not self.left_out

    def describe(self) -> str:
        """One sentence for logs."""
        stayed = ", ".join(f"{count} {name}" for name, count in sorted(self.left_out.items())) or "nothing"
        return (
            f"lean: {self.num_attentions} attention modules, {self.num_mlps} MLPs, {self.num_norms} norms, "
            f"{self.num_rotary_embeddings} rotary embeddings; left as they were: {stayed}"
        )


class Probe(Protocol):
    def __call__(self, token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        """One forward of the model over token_ids, position_ids int64 [1, T]."""
        ...


@torch.inference_mode()
def make_lean(
    model: Any, shapes: list[LayerShape], ops: AttentionOps, *, max_positions: int, probe: Probe | None = None
) -> LeanReport:
    """Replace what can be replaced, in place. shapes: what the probe forward saw of each layer. probe: None calls the
    model as a causal language model of transformers is called.
    """
    parameter = next(model.parameters())
    is_elsewhere = ops.row_backend == "cpu" and parameter.device.type != "cpu"
    if parameter.dtype not in (torch.bfloat16, torch.float32) or is_elsewhere:
        return LeanReport(0, 0, 0, 0, {})
    kernels = resolve_row_kernels(ops.row_backend)
    left_out: Counter[str] = Counter()
    num_norms = _replace_norms(model, kernels, left_out)
    calls = _record_calls(model, shapes, ops, probe or _causal_lm_probe(model))
    num_attentions = _replace_attentions(model, shapes, calls, kernels, left_out)
    num_mlps = _replace_mlps(model, kernels, left_out)
    num_rotaries = _replace_rotaries(model, max_positions, parameter.dtype)
    return LeanReport(num_norms, num_mlps, num_attentions, num_rotaries, dict(left_out))


def _put(model: torch.nn.Module, name: str, replacement: torch.nn.Module) -> None:
    parent_name, _, child_name = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    lean_check.carry_over(parent._modules[child_name], replacement)  # type: ignore[arg-type]
    setattr(parent, child_name, replacement)


def _replace_norms(model: torch.nn.Module, kernels: RowKernels, left_out: Counter[str]) -> int:
    count = 0
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("Norm"):
            continue
        replacement = lean_norm(module, kernels)
        if replacement is None:
            left_out[type(module).__name__] += 1
        else:
            _put(model, name, replacement)
            count += 1
    return count


def _causal_lm_probe(model: Any) -> Probe:
    def run(token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        return model(
            token_ids, position_ids=position_ids, use_cache=False, logits_to_keep=position_ids[0, -1:], paged=paged
        )

    return run


def _record_calls(model: Any, shapes: list[LayerShape], ops: AttentionOps, probe: Probe) -> list[ModuleCall]:
    """How each attention module is called, seen in one forward whose attention function only records."""
    calls: dict[str, ModuleCall] = {}
    handles = [
        model.get_submodule(shape.module_name).register_forward_pre_hook(
            lambda _module, args, kwargs, name=shape.module_name: calls.update({name: ModuleCall(args, kwargs)}),
            with_kwargs=True,
        )
        for shape in shapes
    ]
    device = next(model.parameters()).device
    positions = torch.arange(8, device=device)[None]
    try:
        probe(torch.zeros_like(positions), positions, PagedContext(ops, probe=AttentionProbe({})))
    finally:
        for handle in handles:
            handle.remove()
    return [calls[shape.module_name] for shape in shapes]


def _replace_attentions(
    model: Any, shapes: list[LayerShape], calls: list[ModuleCall], kernels: RowKernels, left_out: Counter[str]
) -> int:
    known: dict[Any, bool | None] = {}
    count = 0
    for shape, call in zip(shapes, calls, strict=True):
        module = model.get_submodule(shape.module_name)
        key = (lean_check.signature(module), shape.num_query_heads, shape.num_kv_heads, shape.sliding_window)
        is_new = key not in known
        if is_new:
            known[key] = lean_attention.finds_rotation(module, call, shapes, shape, kernels)
        rotates = known[key]
        replacement = None
        if rotates is not None:
            hidden_states = lean_attention.random_rows(call.width, next(module.parameters()))
            theirs = lean_attention.record(module, call, hidden_states, shapes)
            replacement = lean_attention.build(module, shape, theirs.constants, kernels, rotates=rotates)
            # Once more in the model's own dtype: a module may change dtypes on the way.
            if is_new and replacement is not None:
                ours = lean_attention.record(replacement, call, hidden_states, shapes)
                if not lean_attention.agree(ours, theirs):
                    replacement = known[key] = None
        if replacement is None:
            left_out[type(module).__name__] += 1
        else:
            _put(model, shape.module_name, replacement)
            count += 1
    return count


def _replace_mlps(model: torch.nn.Module, kernels: RowKernels, left_out: Counter[str]) -> int:
    known: dict[Any, str | None] = {}
    count = 0
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("MLP"):
            continue
        key = lean_check.signature(module)
        if key not in known:
            known[key] = find_activation(module, kernels)
        activation = known[key]
        replacement = None if activation is None else build_mlp(module, activation, kernels)
        if replacement is None:
            left_out[type(module).__name__] += 1
        else:
            _put(model, name, replacement)
            count += 1
    return count


def _replace_rotaries(model: torch.nn.Module, max_positions: int, dtype: torch.dtype) -> int:
    count = 0
    for name, module in list(model.named_modules()):
        replacement = lean_rotary(module, max_positions, dtype)
        if replacement is not None:
            _put(model, name, replacement)
            count += 1
    return count
