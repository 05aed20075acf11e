"""Lets quantised weights that wait to be packed compute by dequantising them: a check of the whole model needs it.

Not here: the weights (coded_weights, coded_experts), and probes, for which zeros suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.engine.model.coded_weights import CodedLinear, WaitingExperts, dequantised_linear
from outrider.engine.model.row_invariant_experts import PACKED, has_waiting_weights, is_experts, weight_names


@contextmanager
def dequantising(model: torch.nn.Module) -> Iterator[None]:
    """Makes the model's coded linears and experts compute instead of giving zeros while the context is open.

    Each call reads its weight and dequantises it, so that memory holds one at a time.
    """
    linears = [part for part in model.modules() if isinstance(part, CodedLinear)]
    mixtures: list[Any] = [part for part in model.modules() if is_experts(part) and has_waiting_weights(part)]
    try:
        for linear in linears:
            linear.computes = True
        for experts in mixtures:
            setattr(experts, PACKED, _Experts(experts))
        yield
    finally:
        for linear in linears:
            linear.computes = False
        for experts in mixtures:
            delattr(experts, PACKED)


class _Experts:
    """Stands for a module's list of packed experts."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __getitem__(self, expert: int) -> _Expert:
        return _Expert(self._experts, expert)


class _Expert:
    def __init__(self, experts: Any, expert: int) -> None:
        self._experts, self._expert = experts, expert

    def up(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, weight_names(self._experts)[0])

    def down(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, weight_names(self._experts)[1])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        stacked = getattr(self._experts, name)
        bias = getattr(self._experts, f"{name}_bias")[self._expert] if self._experts.has_bias else None
        if isinstance(stacked, WaitingExperts):
            return dequantised_linear(x, stacked.parts[self._expert], bias)
        weight = stacked[self._expert]
        return torch.nn.functional.linear(x, weight.t() if self._experts.is_transposed else weight, bias)
