"""Rounding to bf16 and dot products that agree between triton's interpreter and a GPU.

The interpreter (triton 3.6) truncates to bf16 instead of rounding to nearest even, multiplies the bit patterns of bf16
in `tl.dot`, and sums in the order of numpy's BLAS, which depends on a row's place in the tile (OpenBLAS on Zen 5). On a
GPU these functions are just `to` and `dot`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _probe():  # type: ignore[no-untyped-def]
    pass


# Decided by the type that triton.jit returns, not by the environment.
INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))


def runs_on(device_type: str) -> bool:
    """Returns whether triton kernels accept tensors of this device: a GPU's, or the CPU's under the interpreter."""
    return device_type == "cuda" or bool(INTERPRETED.value)


@triton.jit
def round_to(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x (fp32) rounded to nearest even in dtype (bf16 or fp32)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot_in_fp32(left, right, total):  # type: ignore[no-untyped-def]
    """total + left @ right, products and sums in fp32, never TF32."""
    if INTERPRETED:
        # fp64, so that the final rounding hides the order of the BLAS's sums.
        left, right, total = left.to(tl.float64), right.to(tl.float64), total.to(tl.float64)
        return tl.dot(left, right, total, out_dtype=tl.float64).to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def fma_in_fp32(left, right, addend):  # type: ignore[no-untyped-def]
    """left * right + addend in fp32, rounded once; interpreted by way of fp64, where the product is exact."""
    if INTERPRETED:
        return (left.to(tl.float64) * right.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)
    return tl.fma(left, right, addend)
