"""Rotary position embedding in plain torch, rounded as in transformers (Su et al. 2021, sec. 3.4.2): the oracle.

The halves of a head are rotated against each other (llama), not adjacent elements.
"""

from __future__ import annotations

import torch


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, H, D], cos and sin [T, R], R <= D even; returns [T, H, D], elements from R on unchanged."""
    num_rotated = cos.shape[-1]
    turned, kept = heads[..., :num_rotated], heads[..., num_rotated:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[:, None] + swapped * sin[:, None], kept), dim=-1)
