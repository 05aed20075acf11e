"""The arguments of the gated norm, declared once for its callers and for every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.kernels.errors import KernelArgumentError

ACTIVATIONS = ("silu", "sigmoid")


@dataclass(frozen=True)
class GatedNormLayer:
    """One layer's constants. The roundings are those of the model's family in transformers.

    gates_first: the norm is of x * act(gate); else x alone is normalised, and act(gate) multiplies what comes of it.
    rounds_first: rounded to the model's dtype before the weight and after it; else at the end alone.
    """

    weight: torch.Tensor  # model dtype [I], or [group_size]: the same for all groups
    group_size: int  # elements of one mean; a divisor of I
    eps: float
    gates_first: bool
    rounds_first: bool
    activation: str = "silu"  # of ACTIVATIONS


class GatedNorm(Protocol):
    """A kernel of the gated norm. A row's bits depend on that row alone."""

    def __call__(self, x: torch.Tensor, gate: torch.Tensor, layer: GatedNormLayer) -> torch.Tensor:
        """x and gate [T, I] in the model's dtype; returns [T, I] in that dtype. Raises KernelArgumentError."""


def require_fit(x: torch.Tensor, gate: torch.Tensor, layer: GatedNormLayer) -> None:
    """Checks shapes, strides and the dtype, fp32 or bf16. Raises KernelArgumentError."""
    width = x.shape[1]
    fits = (
        x.shape == gate.shape
        and width % layer.group_size == 0
        and layer.weight.shape in ((width,), (layer.group_size,))
    )
    if not fits or x.dtype not in (torch.bfloat16, torch.float32) or {gate.dtype, layer.weight.dtype} != {x.dtype}:
        given = f"x {tuple(x.shape)} ({x.dtype}), gate {tuple(gate.shape)} ({gate.dtype})"
        raise KernelArgumentError(f"{given} do not fit weight {tuple(layer.weight.shape)} ({layer.weight.dtype})")
    if x.stride(1) != 1 or gate.stride(1) != 1 or not layer.weight.is_contiguous():
        raise KernelArgumentError("x, gate and weight must be contiguous in their last dimension")
