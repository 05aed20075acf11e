"""Which kernels compute a model's norms, gates, rotations and linears: those of the attention backend's machine.

Not here: the kernels (kernels/*) and where they are put (lean, row_invariance). Attention's own are `attention`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import BackendUnavailable


class RmsNorm(Protocol):
    """kernels/rms_norm."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, one_plus_weight: bool, rounds_first: bool
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowKernels:
    """One backend's; `backend` also says which linears (row_invariant_modules.row_invariant_linear).

    Functions, not modules: what holds them is copied deeply when its stand-in is looked for (lean_check).
    """

    backend: str  # "cpu" or "triton"
    rms_norm: RmsNorm
    takes_norm: Callable[[torch.Tensor], bool]  # weight
    gated_activation: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]  # gate, up, name
    takes_activation: Callable[[int, torch.dtype], bool]  # width
    # heads, cos, sin; what is returned is turned, what was given may be too.
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    takes_rotation: Callable[[int, torch.dtype], bool]  # number of rotated elements


def resolve_row_kernels(backend: str) -> RowKernels:
    """The kernels of AttentionOps.row_backend. Raises BackendUnavailable."""
    # Imported here: numba and triton take a moment each, and a machine may lack one of them.
    if backend == "cpu":
        from kernels.gated_activation import cpu as cpu_activation
        from kernels.rms_norm import cpu as cpu_norm
        from kernels.rotary import cpu as cpu_rotary

        return RowKernels(
            backend,
            *(cpu_norm.rms_norm, cpu_norm.supports),
            *(cpu_activation.gated_activation, cpu_activation.supports),
            *(cpu_rotary.rotate, cpu_rotary.supports),
        )
    if backend == "triton":
        from kernels.gated_activation import triton as triton_activation
        from kernels.rms_norm import triton as triton_norm
        from kernels.rotary import triton as triton_rotary

        return RowKernels(
            backend,
            *(triton_norm.rms_norm, triton_norm.supports),
            *(triton_activation.gated_activation, triton_activation.supports),
            *(triton_rotary.rotate_, triton_rotary.supports),
        )
    raise BackendUnavailable(f"row kernels {backend!r}: choose one of cpu, triton")
