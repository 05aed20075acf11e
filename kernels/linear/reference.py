"""A linear layer in fp64, rounded once to the input's dtype: the oracle of the linear kernels.

Not a fast path, and its bits are not those of the kernels, which accumulate in fp32.
"""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] or None; returns [..., N] in the dtype of x."""
    out = (x.double().unsqueeze(-2) * weight.double()).sum(dim=-1)
    return (out if bias is None else out + bias.double()).to(x.dtype)
