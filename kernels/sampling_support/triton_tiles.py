"""Device functions: a tile of logits, their order as int32 keys, and membership in the row's law.

KEY_SHIFT drops the bits that a narrower dtype never sets: 16 for bfloat16, 13 for float16, 0 for float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# key of -inf in float32, before KEY_SHIFT
LOWEST_KEY = tl.constexpr(-2139095041)
LARGEST = tl.constexpr(3.4028234663852886e38)


def key_shift(dtype: torch.dtype) -> int:
    return {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[dtype]


@triton.jit
def load_tile(row_ptr, ids, count):  # type: ignore[no-untyped-def]
    """float32; NaN and values past the end are -inf, +inf the largest float: differences are never NaN."""
    values = tl.load(row_ptr + ids, mask=ids < count, other=-float("inf")).to(tl.float32)
    values = tl.where(values != values, -float("inf"), values)
    return tl.minimum(values, LARGEST)


@triton.jit
def keys_of(values, KEY_SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32, ordered as the values; -0.0 equals 0.0."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> KEY_SHIFT


@triton.jit
def value_of(key, KEY_SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32: the value of the row's own dtype that has this int32 key (values between two have the lower one's)."""
    # The shifted-out bits of a negative key are ones, zeros in the float.
    bits = (key << KEY_SHIFT) | tl.where(key < 0, (1 << KEY_SHIFT) - 1, 0)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def log_weights_of(values, top, scale):  # type: ignore[no-untyped-def]
    """float32: (value - top) * scale; -inf is replaced by -1e30, since -inf * 0 is NaN."""
    return tl.maximum(values - top, -1e30) * scale


@triton.jit
def in_support(keys, ids, border_key, border_id):  # type: ignore[no-untyped-def]
    """Above the border, or at it with an id up to `border_id`."""
    return (keys > border_key) | ((keys == border_key) & (ids <= border_id))


@triton.jit
def probabilities(row_ptr, ids, count, top, border_key, border_id, mass, scale, KEY_SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float64: the probability of each int32 id (tile or scalar) under the row's law, 0 for -1."""
    known = tl.where(ids >= 0, ids, count)
    values = load_tile(row_ptr, known, count)
    kept = in_support(keys_of(values, KEY_SHIFT), known, border_key, border_id) & (known < count)
    weights = tl.where(kept, tl.exp(log_weights_of(values, top, scale)), 0.0)
    return weights.to(tl.float64) / mass
