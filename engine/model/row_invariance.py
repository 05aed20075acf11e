"""Makes a loaded model row-invariant: a row's bits do not depend on the number or position of other rows.

Not here: the replacement modules (row_invariant_modules, row_invariant_experts), elementwise functions
(row_invariant_functions), attention (kernels), and the check of the running model (certificate). Left as in
transformers, since measured to be row-invariant on the CPU: LayerNorm, RMSNorm, softmax, top-k, embeddings, cos/sin,
tanh, exp, elementwise arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import activations
from transformers.pytorch_utils import Conv1D

from outrider.engine.model.coded_weights import CodedLinear, pack
from outrider.engine.model.row_invariant_experts import is_experts, pack_experts, put_behind_interface
from outrider.engine.model.row_invariant_modules import RowInvariantActivation, RowInvariantLinear, RowInvariantWeight
from outrider.kernels.linear import cpu, cpu_panels

_ACTIVATION_CLASSES: tuple[type[torch.nn.Module], ...] = tuple(
    {entry[0] if isinstance(entry, tuple) else entry for entry in activations.ACT2CLS.values()}
)


@dataclass(frozen=True)
class RowInvarianceReport:
    """Counts replaced modules, without the linears inside lean modules (row-invariant too)."""

    linear_method: str  # of most linears: "bf16-panels", "onednn-prepacked", "padded-8" or "triton"
    num_linears: int
    num_routers: int
    num_activations: int


def make_row_invariant(model: torch.nn.Module, backend: str = "cpu") -> RowInvarianceReport:
    """Replaces linears, experts, routers' weights and activations in place; backend: "cpu" or "triton".

    Tied weights: the embedding keeps the plain weight, the head gets a packed copy. Unshared plain weights are freed.
    """
    parameter = next(model.parameters())
    dtype, device_type = parameter.dtype, parameter.device.type
    num_linears = num_routers = num_activations = 0
    names_of: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(module, []).append(name)
    while names_of:  # popped one by one, so that each plain weight is freed before the next is packed
        module, names = names_of.popitem()
        put_behind_interface(module)
        if is_experts(module):
            pack_experts(module, backend)
        elif isinstance(module, CodedLinear):
            _replace(model, names, pack([module]))
            num_linears += 1
        elif _is_plain_linear(module):
            _replace(model, names, RowInvariantLinear(*_linear_tensors(module), backend))
            num_linears += 1
        # A GPU computes every element with the same instructions, wherever it lies.
        elif isinstance(module, _ACTIVATION_CLASSES) and device_type == "cpu":
            _replace(model, names, RowInvariantActivation(module))
            num_activations += 1
        elif _is_router(module):
            weight: torch.Tensor = module.weight.detach()  # type: ignore[operator]
            del module.weight
            module.weight = RowInvariantWeight.wrap(weight, backend)
            num_routers += 1
    return RowInvarianceReport(_linear_method(backend, dtype), num_linears, num_routers, num_activations)


def _linear_method(backend: str, dtype: torch.dtype) -> str:
    """Names the method of kernels/linear/row_invariant."""
    if backend == "triton":
        return "triton"
    if cpu_panels.supports(dtype):
        return "bf16-panels"
    return "onednn-prepacked" if cpu.supports(dtype) else "padded-8"


def _is_plain_linear(module: torch.nn.Module) -> bool:
    """Returns whether it is nn.Linear, gpt2's Conv1D or a subclass with nn.Linear's forward; routers have their own."""
    return isinstance(module, Conv1D) or (
        isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    )


def _is_router(module: torch.nn.Module) -> bool:
    """Returns whether it is a module with its own weight matrix; cohere's norms, which have one too, are excluded."""
    weight = module._parameters.get("weight")
    is_other = isinstance(module, torch.nn.Embedding) or type(module).__name__.endswith("Norm")
    return weight is not None and weight.ndim == 2 and not is_other


def _linear_tensors(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight: torch.Tensor = module.weight.detach()  # type: ignore[operator]
    bias = module._parameters.get("bias")
    return weight.t() if isinstance(module, Conv1D) else weight, None if bias is None else bias.detach()


def _replace(model: torch.nn.Module, names: list[str], replacement: torch.nn.Module) -> None:
    for name in names:
        parent_name, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child_name, replacement)
