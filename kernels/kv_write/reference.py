"""Writing keys and values into a paged cache, in plain torch, on any device: the oracle, and the fallback.

A slot is `block_id * block_size + offset`; a cache is [num_blocks, num_kv_heads, block_size, head_dim].
"""

from __future__ import annotations

import torch

from outrider.kernels.kv_codes.layout import is_coded, parts_of
from outrider.kernels.kv_codes.reference import encode


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key [T, Hkv, D] and value [T, Hkv, Dv] to the slots slot_mapping (int64 [T], distinct).

    Into a cache of 8-bit codes, codes and scales of the rows are written (kernels/kv_codes).
    """
    for cache, rows in ((key_cache, key), (value_cache, value)):
        if is_coded(cache):
            codes, scales = encode(rows, cache.dtype)
            for part, found in zip(parts_of(cache), (codes.view(torch.uint8), scales), strict=True):
                _scatter(part, slot_mapping, found)
        else:
            _scatter(cache, slot_mapping, rows)


def kv_move(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """Copy slots source_slots to target_slots (int64 [N]); reads all before it writes any.

    The caches may share memory (latents).
    """
    parts = [part for cache in (key_cache, value_cache) for part in parts_of(cache)]
    block_ids, offsets = _split(source_slots, key_cache.shape[2])
    for part, rows in [(part, part[block_ids, :, offsets]) for part in parts]:
        _scatter(part, target_slots, rows)


def _split(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.div(slots, block_size, rounding_mode="floor"), torch.remainder(slots, block_size)


def _scatter(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    block_ids, offsets = _split(slots, cache.shape[2])
    cache[block_ids, :, offsets] = rows
