"""Attention with linear biases (Press et al. 2022, arXiv:2108.12409), by elements that queries and keys have more.

A key at position p has the bias slope * p in all scores of a head; softmax takes no notice of what a row's biases have
in common. So the bias is a product like the score's others: of the slope, in the query, and of p, in the key.
"""

from __future__ import annotations

import torch

from outrider.engine.attention.layer import PagedContext

# positions; a bfloat16 holds multiples of this up to its square, and what is left below it, to the bit
_STEP = 256
# numbers; with as many of 8 bits a slope has the 24 of a float32
_NUM_SLOPE_PARTS = 3


def add_positions(
    paged: PagedContext, query: torch.Tensor, key: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns query [1, H, T, D + n] and key [1, H or 1, T, D + n]. slopes: [H], divided by the scores' scaling."""
    num_rows, dtype = query.shape[2], query.dtype
    batch = paged.batch
    positions = torch.arange(num_rows) if batch is None else batch.position_ids
    positions = positions.to(query.device, torch.float32)
    low = positions % _STEP
    parts = _parts(slopes.to(query.device), dtype)
    of_keys = torch.stack([positions - low, low], 1).repeat(1, len(parts))
    of_queries = torch.stack(parts, 1).repeat_interleave(2, 1)
    return (
        torch.cat([query, of_queries.to(dtype)[None, :, None].expand(1, -1, num_rows, -1)], -1),
        torch.cat([key, of_keys.to(dtype)[None, None].expand(1, key.shape[1], -1, -1)], -1),
    )


def _parts(slopes: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns numbers of this dtype, in float32, whose sum is each slope."""
    if dtype == torch.float32:
        return [slopes]
    parts: list[torch.Tensor] = []
    for _ in range(_NUM_SLOPE_PARTS):
        parts.append(slopes.to(dtype).float())
        slopes = slopes - parts[-1]
    return parts
