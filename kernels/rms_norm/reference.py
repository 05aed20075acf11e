"""RMS normalisation in plain torch: the oracle (Zhang and Sennrich 2019, eq. 4, with transformers' rounding)."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, one_plus_weight: bool, rounds_first: bool
) -> torch.Tensor:
    """x [..., W], weight [W]; returns [..., W] in the dtype of x.

    one_plus_weight: the factor is 1 + weight (gemma). rounds_first: the normalised row is rounded to the dtype before
    the multiplication by the weight (llama), else after it (olmo2, gemma).
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    factor = 1.0 + weight.float() if one_plus_weight else weight.float()
    if rounds_first:
        normalised = normalised.to(x.dtype).float()
    return (normalised * factor).to(x.dtype)
