"""The codes of a row, in plain torch, on any device: the oracle.

The law. A row x of one token and one head has one fp32 scale, max|x| / L, with L = 127 for int8 and 448 for e4m3. Its
codes are x / scale, divided in fp32, limited to [-L, L] and rounded to the nearest code, ties to even. A row of zeros,
or so small that its scale is 0, has codes 0. An infinity or a NaN makes the scale NaN, and so whatever sees the row.
What the cache then holds is code * scale, exactly: no kernel rounds that product.

Nothing but the row decides its codes, so they are the same in any chunk, batch or tree, and after a move.
Error of an element, for scales that are normal numbers: int8 at most max|x| / 254; e4m3 at most |x| / 16, or
max|x| / (448 * 1024) near zero. The rounding of the division adds 2^-23 of |x| to either.
"""

from __future__ import annotations

import torch

from outrider.kernels.kv_codes.layout import LARGEST_CODE, scales_of


def encode(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., dim], bf16 or fp32 -> codes [..., dim] of the dtype, scales fp32 [...]."""
    largest = LARGEST_CODE[dtype]
    wide = rows.float()
    amax = wide.abs().amax(dim=-1)
    # By a tensor: a number's reciprocal is what torch multiplies by on a GPU. The difference is 0, or NaN where amax is
    # not finite.
    scales = amax / torch.full_like(amax, largest) + (amax - amax)
    quotients = torch.where(scales[..., None] > 0, wide / scales[..., None], 0.0).clamp(-largest, largest)
    codes = quotients.round() if dtype == torch.int8 else quotients
    return codes.to(dtype), scales


def decode(cache: torch.Tensor) -> torch.Tensor:
    """Returns the values of a coded cache, fp64 [num_blocks, num_kv_heads, block_size, dim]: exact."""
    return cache.double() * scales_of(cache)[..., None].double()
