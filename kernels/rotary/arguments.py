"""Argument checks of the rotary kernels."""

from __future__ import annotations

import torch

from outrider.kernels.errors import KernelArgumentError


def require_fit(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_supported: bool) -> None:
    """heads [T, H, D], cos and sin [T, R]; is_supported: the kernel's answer for R. Raises KernelArgumentError."""
    num_rows, _, head_dim = heads.shape
    num_rotated = cos.shape[-1]
    if cos.shape != (num_rows, num_rotated) or cos.shape != sin.shape or num_rotated > head_dim:
        raise KernelArgumentError(f"cos {tuple(cos.shape)} does not fit heads {tuple(heads.shape)}")
    if heads.dtype != cos.dtype or not is_supported or heads.stride(2) != 1:
        raise KernelArgumentError(f"heads ({heads.dtype}) cannot be rotated by {num_rotated} elements ({cos.dtype})")
