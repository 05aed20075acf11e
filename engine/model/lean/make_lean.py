"""Replaces a model's norms, MLPs, attention modules and rotary embeddings by lean ones: fewer, larger operations.

No model code is copied and no architecture is known by name. A module is replaced only if its replacement computes the
same on random data in fp32, with perturbed norms and biases (lean_check); all other modules stay transformers', and are
reported. A check that raises leaves its module as it is. Runs before make_row_invariant, which handles the rest; the
certificate checks both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.model.lean import lean_attention, lean_check
from outrider.engine.model.lean.lean_mlp import build as build_mlp
from outrider.engine.model.lean.lean_mlp import find_activation
from outrider.engine.model.lean.lean_norm import lean_norm
from outrider.engine.model.lean.lean_rotary import is_rotary, lean_rotary
from outrider.engine.model.lean.module_calls import ModuleCall, Probe, causal_lm_probe, record_calls
from outrider.engine.model.row_kernels import RowKernels, resolve_row_kernels

logger = logging.getLogger(__name__)

Replacement = TypeVar("Replacement", bound=torch.nn.Module)


@dataclass(frozen=True)
class LeanReport:
    """Counts replaced modules, and those of the same kinds that stayed (class name -> number)."""

    num_norms: int
    num_mlps: int
    num_attentions: int
    num_rotary_embeddings: int
    left_out: dict[str, int]

    @property
    def is_whole(self) -> bool:
        """Returns whether no module of transformers' is left between the linears."""
        return self.num_attentions > 0 and not self.left_out

    def describe(self) -> str:
        """Describes the report in one sentence, for logs."""
        stayed = ", ".join(f"{count} {name}" for name, count in sorted(self.left_out.items())) or "nothing"
        return (
            f"lean: {self.num_attentions} attention modules, {self.num_mlps} MLPs, {self.num_norms} norms, "
            f"{self.num_rotary_embeddings} rotary embeddings; not replaced: {stayed}"
        )


@torch.inference_mode()
def make_lean(
    model: Any, shapes: list[LayerShape], ops: AttentionOps, *, max_positions: int, probe: Probe | None = None
) -> LeanReport:
    """Replaces modules in place.

    shapes: each layer's, from the probe forward. probe: None calls the model as a causal language model.
    """
    parameter = next(model.parameters())
    is_elsewhere = ops.row_backend == "cpu" and parameter.device.type != "cpu"
    if parameter.dtype not in (torch.bfloat16, torch.float32) or is_elsewhere:
        return LeanReport(0, 0, 0, 0, {})
    kernels = resolve_row_kernels(ops.row_backend)
    left_out: Counter[str] = Counter()
    num_norms = _replace_norms(model, kernels, left_out)
    rotaries = [name for name, module in model.named_modules() if is_rotary(module, max_positions)]
    names = {*rotaries, *(shape.module_name for shape in shapes)}
    calls = record_calls(model, names, ops, max_positions, probe or causal_lm_probe(model))
    num_attentions = _replace_attentions(model, shapes, calls, kernels, left_out)
    num_mlps = _replace_mlps(model, kernels, left_out)
    num_rotaries = _replace_rotaries(model, calls, max_positions, parameter.dtype, left_out)
    return LeanReport(num_norms, num_mlps, num_attentions, num_rotaries, dict(left_out))


def _attempt(
    left_out: Counter[str], find: Callable[..., Replacement | None], module: torch.nn.Module, *args: Any
) -> Replacement | None:
    """Returns find(module, *args); None also if it raises. A module without a replacement is counted in left_out."""
    kind = type(module).__name__
    replacement = None
    try:
        replacement = find(module, *args)
    except Exception as error:  # an optimisation must not stop a load
        if not left_out[kind]:
            logger.warning("lean: %s is not replaced, since checking its replacement raised %r", kind, error)
    if replacement is None:
        left_out[kind] += 1
    return replacement


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
        replacement = _attempt(left_out, lean_norm, module, kernels)
        if replacement is not None:
            _put(model, name, replacement)
            count += 1
    return count


def _replace_attentions(
    model: Any,
    shapes: list[LayerShape],
    calls: dict[str, list[ModuleCall]],
    kernels: RowKernels,
    left_out: Counter[str],
) -> int:
    known: dict[Any, bool | None] = {}  # signature -> whether the replacement rotates; None: there is none

    def find(module: torch.nn.Module, shape: LayerShape) -> lean_attention.LeanAttention | None:
        if shape.values_in_keys or hasattr(module, "paged"):  # latent and own attention have no lean form
            return None
        call = calls[shape.module_name][-1]
        sizes = (shape.num_query_heads, shape.num_kv_heads, shape.sliding_window, shape.chunk_size)
        key = (lean_check.signature(module), *sizes)
        is_new = key not in known
        if is_new:
            known[key] = None  # until every check has passed
            rotates = lean_attention.finds_rotation(module, call, shapes, shape, kernels)
        else:
            rotates = known[key]
        if rotates is None:
            return None
        replacement = lean_attention.build_in_place_of(
            module, call, shapes, shape, kernels, rotates=rotates, checks=is_new
        )
        if replacement is not None:
            known[key] = rotates
        return replacement

    count = 0
    for shape in shapes:
        module = model.get_submodule(shape.module_name)
        replacement = _attempt(left_out, find, module, shape)
        if replacement is not None:
            _put(model, shape.module_name, replacement)
            count += 1
    return count


def _replace_mlps(model: torch.nn.Module, kernels: RowKernels, left_out: Counter[str]) -> int:
    known: dict[Any, str | None] = {}

    def find(module: torch.nn.Module) -> torch.nn.Module | None:
        key = lean_check.signature(module)
        if key not in known:
            known[key] = None  # stays if the check raises
            known[key] = find_activation(module, kernels)
        activation = known[key]
        return None if activation is None else build_mlp(module, activation, kernels)

    count = 0
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("MLP"):
            continue
        replacement = _attempt(left_out, find, module)
        if replacement is not None:
            _put(model, name, replacement)
            count += 1
    return count


def _replace_rotaries(
    model: torch.nn.Module,
    calls: dict[str, list[ModuleCall]],
    max_positions: int,
    dtype: torch.dtype,
    left_out: Counter[str],
) -> int:
    count = 0
    for name, module in list(model.named_modules()):
        if not is_rotary(module, max_positions):
            continue
        replacement = _attempt(left_out, lean_rotary, module, calls.get(name, []), max_positions, dtype)
        if replacement is not None:
            _put(model, name, replacement)
            count += 1
    return count
