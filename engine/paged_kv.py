"""The paged KV cache: for every layer a key and a value tensor, cut into blocks.

Not here: which block belongs to whom (block_manager) and how a row is written or read (kernels).
Layout per layer: keys [num_blocks, num_kv_heads, block_size, key_dim], values [..., value_dim]. A slot is
`block_id * block_size + offset`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from engine.attention import AttentionOps

DEFAULT_BLOCK_SIZE = 16
# A cache line, as torch aligns its own.
_ALIGNMENT = 64


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer showed of itself in the probe forward."""

    module_name: str
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None


class PagedKVCache:
    """Keys and values of all layers; layer i is that of the attention module with layer_idx i."""

    def __init__(
        self,
        layer_shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: AttentionOps,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, not {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._ops = ops
        # Zeros, never `empty`: a stale NaN in a masked position times a zero weight would still be NaN.
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            (
                _zeros((num_blocks, shape.num_kv_heads, block_size, shape.key_dim), dtype, device),
                _zeros((num_blocks, shape.num_kv_heads, block_size, shape.value_dim), dtype, device),
            )
            for shape in layer_shapes
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copy slots (int64 [N] each) in every layer; all sources are read before any target is written."""
        if source_slots.numel() == 0:
            return
        device = self.layers[0][0].device
        sources, targets = source_slots.to(device), target_slots.to(device)
        for key_cache, value_cache in self.layers:
            self._ops.kv_move(key_cache, value_cache, sources, targets)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU a page is taken from the system when it is first used: zeroing 512 MiB took 0.6 to 1.7 s at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


def bytes_per_block(layer_shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    per_token = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in layer_shapes)
    return per_token * block_size * dtype.itemsize
