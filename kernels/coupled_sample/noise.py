"""The shared noise words of exact mode, as torch tensors on any device.

Defined in engine/sampling/coupling.py, with equal bits; keys come from its `index_key`, on the host.
"""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF


def noise_words(token_ids: torch.Tensor, key_words: torch.Tensor) -> torch.Tensor:
    """int64 [R, N], each in [0, 2^32): the hash of every id under every key.

    `token_ids`: integer [N]; `key_words`: int32 [R, 2], low and high word of each key, wrapped into int32.
    """
    keys = key_words.to(torch.int64) & _MASK32
    # Products wrap modulo 2^64; their low 32 bits are exact.
    words = (token_ids.to(torch.int64)[None, :] * 0x9E3779B1 + keys[:, :1]) & _MASK32
    return _fmix32(_fmix32(words) ^ keys[:, 1:])


def exponentials(token_ids: torch.Tensor, key_words: torch.Tensor) -> torch.Tensor:
    """float64 [R, N], each Exp(1)."""
    uniforms = (noise_words(token_ids, key_words).to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log1p(-uniforms)


def _fmix32(words: torch.Tensor) -> torch.Tensor:
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _MASK32
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _MASK32
    return words ^ (words >> 16)
