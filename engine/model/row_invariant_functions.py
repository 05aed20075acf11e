"""Runs elementwise functions without scalar tails where a model's forward calls them as functions, not as modules.

`torch.sigmoid(gate)` of a shared expert, a router's `F.sigmoid`, `F.silu`: there is no module that could be replaced.
Not here: activation modules, and why tails differ (row_invariant_modules.RowInvariantActivation).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outrider.engine.model.row_invariant_modules import apply_in_whole_vectors

# Functions whose bits differed between a row alone and the same row among others (torch 2.13, AVX512; widths 1 to 100).
# Not exp, expm1, log, log1p, tanh, erf, sqrt, softmax, logsigmoid, hardswish, glu; rsqrt in bf16 only, which no norm
# uses.
_FUNCTIONS = frozenset(
    {
        *(torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit),
        *(torch.exp2, torch.Tensor.exp2, torch.special.exp2),
        *(functional.silu, functional.mish, functional.elu, functional.selu, functional.celu),
        *(torch.selu, torch.celu),
        *(functional.gelu, functional.softplus),
    }
)
_IN_PLACE = frozenset(
    {
        *(torch.sigmoid_, torch.Tensor.sigmoid_, torch.exp2_, torch.Tensor.exp2_),
        *(torch.selu_, torch.celu_, functional.elu_),
    }
)
# Packages whose modules call no such function. tensor_parallel and Llama 4's mixture are excluded: they hold experts,
# or the router, of transformers.
_OUR_PACKAGES = ("outrider.engine.model.", "outrider.engine.recurrent.")
_NOT_OURS = "outrider.engine.model.llama4."


class WholeVectorFunctions(TorchFunctionMode):
    """Runs elementwise functions in whole vectors while it is entered; num_calls counts them."""

    num_calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        in_place = func in _IN_PLACE or (func in _FUNCTIONS and options.get("inplace", False))
        if not in_place and func not in _FUNCTIONS:
            return func(*args, **options)
        self.num_calls += 1
        x, *rest = args if args else (options.pop("input"),)
        result = apply_in_whole_vectors(lambda flat: func(flat, *rest, **options), x)
        return x.copy_(result) if in_place else result


def run_in_whole_vectors(model: torch.nn.Module) -> None:
    """Wraps every forward of the model in WholeVectorFunctions, except within our own modules.

    These are already row-invariant. Costs about 1.4 us per torch call of the modules that are not ours.
    """
    for module in _outermost_of_ours(model):
        _run_within(module, torch._C.DisableTorchFunction)
    _run_within(model, WholeVectorFunctions)


def _outermost_of_ours(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        package = type(child).__module__
        if package.startswith(_OUR_PACKAGES) and not package.startswith(_NOT_OURS):
            yield child
        else:
            yield from _outermost_of_ours(child)


def _run_within(module: torch.nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    module.forward = within
