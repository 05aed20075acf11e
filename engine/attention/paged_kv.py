"""The paged KV cache: per layer, keys [num_blocks, num_kv_heads, block_size, key_dim] and values [..., value_dim].

In a layer that caches latents, the values are a view of the keys. A layer with an indexer (attention/choice) has that
one's keys too. A slot is `block_id * block_size + offset`. With an
8-bit dtype, keys and values are codes with their scales (kernels/kv_codes).
Not here: block ownership (block_manager), writing and reading rows (kernels).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.zeroed_memory import give_back, zeros
from outrider.kernels.kv_codes.layout import LARGEST_CODE, head_bytes, view_codes

CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # by the names of shared/vllm_keys
CODE_NAMES = {dtype: name for name, dtype in CODE_DTYPES.items()}
DEFAULT_BLOCK_SIZE = 16  # positions
# bytes; what a block of no layers counts as in a budget; bounds how many ids there are, of a few hundred bytes each
_EMPTY_BLOCK_BYTES = 4096


class PagedKVCache:
    """Keys and values of all layers; layers[i] belongs to the attention module with layer_idx i."""

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
        self.num_bytes = num_blocks * bytes_per_block(layer_shapes, block_size, dtype)
        self._ops = ops
        # Zeros, not `empty`: a stale NaN at a masked position, times a zero weight, would still be NaN.
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            _layer(shape, (num_blocks, shape.num_kv_heads, block_size), dtype, device) for shape in layer_shapes
        ]
        # By layer_idx, [num_blocks, 1, block_size, index_dim].
        self.index_keys: dict[int, torch.Tensor] = {
            layer: zeros((num_blocks, 1, block_size, shape.index_dim), dtype, device)
            for layer, shape in enumerate(layer_shapes)
            if shape.index_dim
        }

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields all that is cached, in pairs [num_blocks, heads, block_size, ...]; a pair may be one tensor twice."""
        yield from self.layers
        for keys in self.index_keys.values():
            yield keys, keys

    def give_back(self) -> None:
        """Gives the system the memory of what nobody reads again; all that is cached is lost."""
        for pair in self.parts():
            for tensor in pair:
                give_back(tensor)

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copies slots (int64 [N] each) in every layer; reads all sources before it writes any target."""
        if source_slots.numel() == 0 or not self.layers:
            return
        device = self.layers[0][0].device
        sources, targets = source_slots.to(device), target_slots.to(device)
        for key_cache, value_cache in self.parts():
            self._ops.kv_move(key_cache, value_cache, sources, targets)


def _layer(
    shape: LayerShape, places: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates the keys and values of one layer. places: (blocks, heads, slots of a block)."""
    if dtype in LARGEST_CODE:
        if shape.values_in_keys or shape.index_dim:
            raise ValueError(f"{shape.module_name} caches latents or an indexer's keys, which have no 8-bit codes")
        keys, values = (_codes(places, dim, dtype, device) for dim in (shape.key_dim, shape.value_dim))
        return keys, values
    keys = zeros((*places, shape.key_dim), dtype, device)
    if shape.values_in_keys:
        return keys, keys[..., : shape.value_dim]
    return keys, zeros((*places, shape.value_dim), dtype, device)


def _codes(places: tuple[int, int, int], dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates codes and scales, all zero."""
    *heads, block_size = places
    return view_codes(zeros((*heads, head_bytes(block_size, dim)), torch.uint8, device), block_size, dim, dtype)


def bytes_per_block(layer_shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one block over all layers: keys and values, the scales of codes, indexers' keys."""
    if not layer_shapes:
        return _EMPTY_BLOCK_BYTES
    if dtype in LARGEST_CODE:
        dims = ((shape.num_kv_heads, dim) for shape in layer_shapes for dim in (shape.key_dim, shape.value_dim))
        return sum(num_heads * head_bytes(block_size, dim) for num_heads, dim in dims)
    own_values = (0 if shape.values_in_keys else shape.value_dim for shape in layer_shapes)
    pairs = zip(layer_shapes, own_values, strict=True)
    per_token = sum(shape.num_kv_heads * (shape.key_dim + own) + shape.index_dim for shape, own in pairs)
    return per_token * block_size * dtype.itemsize
