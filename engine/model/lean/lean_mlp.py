"""Lean gated MLPs: one linear for gate and up, act(gate) * up, the linear down.

Not here: when MLPs are replaced (lean) and the arithmetic (kernels/linear, kernels/gated_activation).
"""

from __future__ import annotations

import torch

from outrider.engine.model.coded_weights import CodedLinear, pack
from outrider.engine.model.lean import lean_check
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.model.row_kernels import RowKernels
from outrider.kernels.gated_activation.reference import ACTIVATIONS

# Tried in order; the outputs of a tuple's linears, concatenated, are gate and up.
_UP_NAMES = (("gate_proj", "up_proj"), ("gate_up_proj",))


class LeanGatedMLP(torch.nn.Module):
    """Computes down(act(gate(x)) * up(x)); one matrix holds gate's weights, then up's."""

    def __init__(
        self, gate_up: RowInvariantLinear, down: RowInvariantLinear, activation: str, kernels: RowKernels
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._gated_activation = kernels.gated_activation
        self._width = gate_up.out_features // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x).view(-1, 2 * self._width)
        inner = self._gated_activation(both[:, : self._width], both[:, self._width :], self.activation)
        output: torch.Tensor = self.down(inner)
        return output.view(*x.shape[:-1], -1)


def stack(linears: list[torch.nn.Module], backend: str) -> RowInvariantLinear | None:
    """Returns one linear with their concatenated outputs; None if their kinds, inputs or biases do not match."""
    coded = [linear for linear in linears if isinstance(linear, CodedLinear)]
    if len(coded) == len(linears):
        return _stack_coded(coded)
    if any(type(linear) is not torch.nn.Linear for linear in linears):
        return None
    weights = [linear.weight.detach() for linear in linears]  # type: ignore[operator]
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]  # type: ignore[operator]
    if len({bias is None for bias in biases}) > 1 or len({weight.shape[1] for weight in weights}) > 1:
        return None
    bias = None if biases[0] is None else torch.cat(biases)
    return RowInvariantLinear(torch.cat(weights) if len(weights) > 1 else weights[0], bias, backend)


def _stack_coded(linears: list[CodedLinear]) -> RowInvariantLinear | None:
    if len({linear.bias is None for linear in linears}) > 1 or len({linear.in_features for linear in linears}) > 1:
        return None
    return pack(linears)


def build(module: torch.nn.Module, activation: str, kernels: RowKernels) -> LeanGatedMLP | None:
    """Returns the replacement if the module has the parts of a gated MLP; not yet checked."""
    names = next((names for names in _UP_NAMES if all(name in module._modules for name in names)), None)
    if names is None or lean_check.with_weights(module) != {*names, "down_proj"}:
        return None
    if len({_num_outputs(module.get_submodule(name)) for name in names}) > 1:
        return None
    gate_up = stack([module.get_submodule(name) for name in names], kernels.backend)
    down = stack([module.get_submodule("down_proj")], kernels.backend)
    if gate_up is None or down is None or not kernels.takes_activation(gate_up.out_features // 2, torch.float32):
        return None
    return LeanGatedMLP(gate_up, down, activation, kernels)


def _num_outputs(linear: torch.nn.Module) -> int:
    return int(getattr(linear, "out_features", -1))


def find_activation(module: torch.nn.Module, kernels: RowKernels) -> str | None:
    """Returns the activation with which the replacement computes the same; None if none does."""
    if build(module, ACTIVATIONS[0], kernels) is None:
        return None
    tried = lean_check.wide_copy(module)
    num_inputs = int(tried.down_proj.out_features)  # type: ignore[union-attr, arg-type]
    x = 2 * torch.randn(1, 5, num_inputs, generator=torch.Generator().manual_seed(13))
    x = x.to(next(tried.parameters()).device)
    expected = tried(x)
    for activation in ACTIVATIONS:
        candidate = build(tried, activation, kernels)
        if candidate is not None and lean_check.is_close(candidate(x), expected):
            return activation
    return None
