"""Lean RMS norms: one kernel call. A trial finds which of transformers' three orders of rounding a norm uses.

Not here: when norms are replaced (lean) and the arithmetic (kernels/rms_norm).
"""

from __future__ import annotations

import torch

from outrider.engine.model.lean import lean_check
from outrider.engine.model.row_kernels import RowKernels

_VARIANTS = ((False, True), (False, False), (True, False))  # one_plus_weight, rounds_first
_EPS_NAMES = ("variance_epsilon", "eps")
# share; least share of bf16 outputs with transformers' bits; another order of sums changes few, a wrong variant over a
# tenth
_MIN_EQUAL = 0.98


class LeanRMSNorm(torch.nn.Module):
    """Replaces an RMS norm over the last dimension; keeps its weight and eps."""

    def __init__(
        self, weight: torch.Tensor, eps: float, kernels: RowKernels, *, one_plus_weight: bool, rounds_first: bool
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps
        self.one_plus_weight = one_plus_weight
        self.rounds_first = rounds_first
        self._kernels = kernels

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            one_plus_weight=self.one_plus_weight,
            rounds_first=self.rounds_first,
        )


def lean_norm(module: torch.nn.Module, kernels: RowKernels) -> LeanRMSNorm | None:
    """Returns the replacement of an RMS norm; None if the module is not one that the kernel can compute."""
    eps = next((getattr(module, name) for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None or not kernels.takes_norm(weight):
        return None
    variant = _variant(module, eps, weight, kernels)
    if variant is None:
        return None
    return LeanRMSNorm(weight.detach(), eps, kernels, one_plus_weight=variant[0], rounds_first=variant[1])


def _variant(
    module: torch.nn.Module, eps: float, weight: torch.Tensor, kernels: RowKernels
) -> tuple[bool, bool] | None:
    """Returns the variant with the module's bits in bf16, where the order of rounding shows.

    The last rows are of the size of sqrt(eps), so that eps shows too.
    """
    tried = lean_check.wide_copy(module).bfloat16()
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(16, weight.shape[0], generator=generator)
    x[8:] *= eps**0.5
    x = x.bfloat16().to(weight.device)
    expected = tried(x)
    tried_weight: torch.Tensor = tried.weight.detach()  # type: ignore[operator]
    for one_plus_weight, rounds_first in _VARIANTS:
        found = kernels.rms_norm(x, tried_weight, eps, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
        same = expected.dtype == found.dtype and float((found == expected).float().mean())
        if same >= _MIN_EQUAL:
            return one_plus_weight, rounds_first
    return None
