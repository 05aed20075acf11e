"""Argument checks of the gated activation kernels."""

from __future__ import annotations

import torch

from outrider.kernels.errors import KernelArgumentError


def require_fit(gate: torch.Tensor, up: torch.Tensor, *, is_supported: bool) -> None:
    """gate and up [T, I]; is_supported: the kernel's answer for I and the dtype. Raises KernelArgumentError."""
    if gate.shape != up.shape or gate.ndim != 2 or gate.dtype != up.dtype or not is_supported:
        raise KernelArgumentError(f"gate {tuple(gate.shape)} ({gate.dtype}), up {tuple(up.shape)} ({up.dtype})")
    if gate.stride(1) != 1 or up.stride(1) != 1:
        raise KernelArgumentError("gate and up must be contiguous in their last dimension")
