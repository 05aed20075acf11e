"""What triton's interpreter computes otherwise than a GPU does, set right: rounding to bf16, and dots.

The interpreter (triton 3.6) cuts a float off where the GPU rounds to the nearest even bf16, multiplies the bit patterns
of bf16 in `tl.dot`, and leaves the order of its sums to numpy's BLAS (OpenBLAS on AMD's Zen 5: a row's bits depend on
the row's place in the tile). On a GPU these functions are `to` and `dot` and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _probe():  # type: ignore[no-untyped-def]
    pass


# What triton.jit made of a function tells, without a look at the environment, what it will make of the others.
INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))


def runs_on(device_type: str) -> bool:
    """Whether kernels take tensors of this device: of a GPU, and of the CPU under the interpreter."""
    return device_type == "cuda" or bool(INTERPRETED.value)


@triton.jit
def round_to(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x (fp32) rounded to the nearest even number of dtype (bf16 or fp32)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot_in_fp32(left, right, total):  # type: ignore[no-untyped-def]
    """total + left @ right: products and sums in fp32, of fp32 factors too (never TF32)."""
    if INTERPRETED:
        # In fp64 the order of a BLAS's sums is lost in the rounding.
        left, right, total = left.to(tl.float64), right.to(tl.float64), total.to(tl.float64)
        return tl.dot(left, right, total, out_dtype=tl.float64).to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
