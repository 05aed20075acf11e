"""Writing keys and values into a paged cache, in plain torch, on any device: the oracle, and the fallback.

A slot is `block_id * block_size + offset`; a cache is [num_blocks, num_kv_heads, block_size, head_dim].
"""

from __future__ import annotations

import torch


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key [T, Hkv, D] and value [T, Hkv, Dv] to the slots slot_mapping (int64 [T], distinct)."""
    _scatter(key_cache, slot_mapping, key)
    _scatter(value_cache, slot_mapping, value)


def kv_move(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """Copy slots source_slots to target_slots (int64 [N]); reads all before it writes any."""
    for cache in (key_cache, value_cache):
        block_ids, offsets = _split(source_slots, cache.shape[2])
        _scatter(cache, target_slots, cache[block_ids, :, offsets])


def _split(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.div(slots, block_size, rounding_mode="floor"), torch.remainder(slots, block_size)


def _scatter(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    block_ids, offsets = _split(slots, cache.shape[2])
    cache[block_ids, :, offsets] = rows
