"""Row-invariant replacements of a model's linears and activations.

Not here: which module of a model is replaced (row_invariance) and the arithmetic (kernels/linear).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from outrider.kernels.linear.row_invariant import LinearFunction, row_invariant_linear

# elements; widest step of torch's vectorised loops (two vectors of 32 bf16); the rest of a range is a scalar tail
_VECTOR_STEP = 64
# elements; torch splits n evenly over min(num_threads, ceil(n / grain)) threads
_GRAIN = 32_768
# elements; least number at which gelu is split over all threads
_GELU_GRAIN = 16_384


class RowInvariantLinear(torch.nn.Module):
    """Replaces nn.Linear and gpt2's Conv1D.

    weight: empty, since the plain one is freed where possible: its dtype can be read, and computing with it fails.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, backend: str = "cpu") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.new_empty(0)
        self._linear = row_invariant_linear(weight, bias, backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


class RowInvariantWeight(torch.Tensor):
    """A weight [N, K] whose F.linear is row-invariant, for modules that call F.linear(x, self.weight) themselves
    (routers of mixtures of experts). All other functions see a plain tensor."""

    _linears: dict[int | None, LinearFunction]
    _backend: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear and isinstance(args[1], RowInvariantWeight):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return args[1].linear(args[0], bias)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def wrap(cls, weight: torch.Tensor, backend: str = "cpu") -> RowInvariantWeight:
        wrapped = weight.detach().as_subclass(cls)
        wrapped._linears = {}
        wrapped._backend = backend
        return wrapped

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        key = None if bias is None else id(bias)
        if key not in self._linears:
            self._linears[key] = row_invariant_linear(self.as_subclass(torch.Tensor), bias, self._backend)
        return self._linears[key](x)


class RowInvariantActivation(torch.nn.Module):
    """An elementwise activation without scalar tails.

    In torch 2.13 (AVX512) silu, sigmoid, softplus and tanh-gelu have other bits in a range's scalar tail (fp32 silu:
    4 % of the elements; bf16 tanh-gelu: 0.4 %). Unless the width is a multiple of 64, the number of rows decides which
    elements are in a tail.
    """

    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # for row_invariant_functions there is nothing left to do
            return apply_in_whole_vectors(self.activation, x)


def apply_in_whole_vectors(elementwise: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Computes elementwise(x) for any shape, padded so that no element falls into a scalar tail."""
    num_elements = x.numel()
    num_padded = _padded_num_elements(num_elements, torch.get_num_threads())
    if num_elements == num_padded and x.is_contiguous():
        return elementwise(x)
    flat = x.new_zeros(num_padded)
    flat[:num_elements].view(x.shape).copy_(x)
    return elementwise(flat)[:num_elements].view(x.shape)


def _padded_num_elements(num_elements: int, num_threads: int) -> int:
    """Returns the smallest number >= num_elements that torch splits into ranges of whole vectors."""
    if num_elements <= _GELU_GRAIN:
        return num_elements + -num_elements % _VECTOR_STEP
    for used in range(min(num_threads, -(-num_elements // _GRAIN)), num_threads + 1):
        num_padded = num_elements + -num_elements % (_VECTOR_STEP * math.lcm(num_threads, used))
        if min(num_threads, -(-num_padded // _GRAIN)) == used:
            return num_padded
    return num_elements + -num_elements % (_GRAIN * num_threads)
