"""Making and widening 8-bit codes in triton kernels (`reference`), by integers: the same bits on every GPU.

Codes are passed as int8, e4m3 too: not every GPU, and not every triton, converts e4m3 as IEEE would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.kv_codes.layout import is_coded, scales_of


@triton.jit
def widen(codes, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes (int8) as fp32, exact."""
    if IS_E4M3:
        bits = codes.to(tl.int32)
        magnitude = bits & 0x7F
        # A subnormal m / 8 * 2^-6 is made as (1 + m / 8) * 2^-6 first: no fp32 subnormals.
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        small = ((magnitude << 20) + (121 << 23)).to(tl.float32, bitcast=True) - 0.015625
        value = tl.where(magnitude < 8, small, normal)
        return tl.where(bits < 0, -value, value)
    else:
        return codes.to(tl.float32)


@triton.jit
def scale_of(row, is_used, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales [N] of rows [N, D], fp32; NaN where a row is not finite."""
    # Compared as integers: a NaN is larger than all numbers.
    magnitude = tl.where(is_used, row.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    amax = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), tl.div_rn(amax, LARGEST + tl.zeros_like(amax)), float("nan"))


@triton.jit
def narrow(row, scale, LARGEST: tl.constexpr, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes (int8) of rows [N, D], fp32, with scales [N]."""
    is_positive = scale[:, None] > 0
    quotient = tl.div_rn(row, tl.where(is_positive, scale[:, None] + tl.zeros_like(row), 1.0))
    quotient = tl.where(is_positive, quotient, 0.0)
    quotient = tl.where(quotient < LARGEST, quotient, LARGEST)
    quotient = tl.where(quotient > -LARGEST, quotient, -LARGEST)
    if IS_E4M3:
        bits = quotient.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Normal: round the fraction to 3 bits, change the exponent's bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Subnormal, below 2^-6: the number of steps of 2^-9.
        steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0
        small = steps.to(tl.int32, bitcast=True)
        code = tl.where(magnitude < (121 << 23), small, normal) & 0x7F
        code = tl.where(bits < 0, code - 128, code)
    else:
        # The nearest integer in the low bits, ties to even.
        low = (quotient + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(low > 127, low - 256, low)
    return code.to(tl.int8)


def as_arguments(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a cache as two kernel arguments: the codes as int8 and their scales, or an uncoded cache twice."""
    return (cache.view(torch.int8), scales_of(cache)) if is_coded(cache) else (cache, cache)
