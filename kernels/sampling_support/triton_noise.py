"""Device functions: a token's noise, equal to engine/sampling/coupling.py.

low_word, high_word: from its `index_key`, as tl.uint32 scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fmix32(words):  # type: ignore[no-untyped-def]
    words = words ^ (words >> 16)
    words = words * 0x85EBCA6B
    words = words ^ (words >> 13)
    words = words * 0xC2B2AE35
    return words ^ (words >> 16)


@triton.jit
def noise_words(token_ids, low_word, high_word):  # type: ignore[no-untyped-def]
    """uint32, one per int32 token id."""
    words = token_ids.to(tl.uint32) * 0x9E3779B1 + low_word
    return _fmix32(_fmix32(words) ^ high_word)


@triton.jit
def log_exponentials(words):  # type: ignore[no-untyped-def]
    """float32: log(-log(1 - u)) with u = (word + 1/2) / 2^32. Finite for every word.

    Own logarithm: a third of the library's 60 instructions per element, twice.
    """
    # Words above 2^32 - 128 would round to 1, whose exponential is infinite.
    uniforms = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    rest = 1.0 - uniforms
    exponent, fraction = _split(rest)
    # Small exponentials win, so u itself is used where it is small: 1 - u is rounded.
    exponentials = -_log_of(exponent, tl.where(exponent == 0, -uniforms, fraction))
    exponent, fraction = _split(exponentials)
    return _log_of(exponent, fraction)


@triton.jit
def _split(values):  # type: ignore[no-untyped-def]
    """int32 e and float32 f in [-1/3, 1/3) with value = 2^e * (1 + f); value: a positive normal float32."""
    bits = values.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log_of(exponent, fraction):  # type: ignore[no-untyped-def]
    """float32: log(2^e * (1 + f)); minimax polynomial, relative error of log(1 + f) 4e-8."""
    tail = -0.1537272185087204 + fraction * 0.14374218881130219
    tail = 0.13920900225639343 + fraction * tail
    tail = -0.1641935408115387 + fraction * tail
    tail = 0.20016060769557953 + fraction * tail
    tail = -0.2500759959220886 + fraction * tail
    tail = 0.33333104848861694 + fraction * tail
    tail = -0.49999940395355225 + fraction * tail
    return exponent.to(tl.float32) * 0.6931471805599453 + (fraction + fraction * fraction * tail)
