"""Rotary position embedding on an NVIDIA GPU, in place and without temporaries (triton).

Each element is two products and a sum, each rounded to the dtype: torch's bits.

Minimum traffic at 64 rows of 40 heads of 128 bf16: 1.3 MB, 0.4 us at 3.35 TB/s (H100), 0.3 us at 4.8 TB/s (H200), less
than a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.rotary.arguments import require_fit
from outrider.kernels.triton_numbers import round_to

_HEADS_PER_PROGRAM = 4


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    heads, cos, sin, row_stride, head_stride, num_heads,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    dtype = heads.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    angle = row * (2 * HALF) + columns
    inside = columns < HALF
    first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]

    place = heads + row * row_stride + head.to(tl.int64)[:, None] * head_stride + columns[None, :]
    mask = (head < num_heads)[:, None] & inside[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    turned = round_to(first * first_cos, dtype).to(tl.float32) - round_to(second * first_sin, dtype).to(tl.float32)
    tl.store(place, round_to(turned, dtype), mask=mask)
    turned = round_to(second * second_cos, dtype).to(tl.float32) + round_to(first * second_sin, dtype).to(tl.float32)
    tl.store(place + HALF, round_to(turned, dtype), mask=mask)


def supports(num_rotated: int, dtype: torch.dtype) -> bool:
    """Returns whether rotate_ accepts cos and sin of this width and dtype."""
    return num_rotated > 0 and num_rotated % 2 == 0 and dtype in (torch.bfloat16, torch.float32)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes `reference.rotate` in place; heads may be a strided view, contiguous in the last dimension.

    Returns heads. Raises KernelArgumentError.
    """
    num_rows, num_heads, _ = heads.shape
    num_rotated = cos.shape[-1]
    require_fit(heads, cos, sin, is_supported=supports(num_rotated, heads.dtype))
    if heads.numel() == 0:
        return heads
    half = num_rotated // 2
    _rotate[(num_rows, triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        heads, cos.contiguous(), sin.contiguous(), heads.stride(0), heads.stride(1), num_heads,
        HALF=half, BLOCK_HALF=triton.next_power_of_2(half), BLOCK_HEADS=_HEADS_PER_PROGRAM,
        # A fused multiply-add would not round the fp32 product.
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return heads
