"""F.linear with rows padded to a multiple of eight: the fallback where oneDNN cannot prepack.

Row-invariant only if the BLAS treats multiples of eight alike: the start-up certificate decides.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as stock_linear
from torch.nn.functional import pad

ROW_TILE = 8


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] or None; returns [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    missing = -num_rows % ROW_TILE
    if missing:
        rows = pad(rows, (0, 0, 0, missing))
    return stock_linear(rows, weight, bias)[:num_rows].view(*x.shape[:-1], weight.shape[0])
