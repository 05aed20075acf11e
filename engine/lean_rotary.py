"""Cosines and sines of rotary embeddings looked up instead of computed: two index operations instead of eight.

The table is what the model's own module computes for positions 0 to max_model_len. Not here: when modules are replaced
(lean) and the rotation (kernels/rotary).
"""

from __future__ import annotations

from typing import Any

import torch

# 64 MiB for cos and sin of 128 bf16 elements: longer contexts keep transformers' module.
MAX_POSITIONS = 131_072
_CHUNK = 4096


class LeanRotaryEmbedding(torch.nn.Module):
    """Stands in for a module (x, position_ids [1, T], ...) -> (cos [1, T, R], sin [1, T, R])."""

    def __init__(self, original: torch.nn.Module, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.original = original
        self._max_positions = max_positions
        self._dtype = dtype
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (*args, *kwargs.items())
        if x.dtype != self._dtype:
            return self.original(x, position_ids, *args, **kwargs)
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = self._compute(x, args, kwargs)
        cos, sin = tables
        positions = position_ids[0]
        try:
            return cos.index_select(0, positions)[None], sin.index_select(0, positions)[None]
        # Beyond the table; the module computes the same for any position. The engine asks for no such position.
        except (IndexError, RuntimeError):
            return self.original(x, position_ids, *args, **kwargs)

    def _compute(self, x: torch.Tensor, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for start in range(0, self._max_positions, _CHUNK):
            positions = torch.arange(start, min(start + _CHUNK, self._max_positions), device=x.device)[None]
            parts.append(self.original(x, positions, *args, **kwargs))
        cos, sin = (torch.cat([part[side][0] for part in parts]).contiguous() for side in (0, 1))
        return cos, sin


def lean_rotary(module: torch.nn.Module, max_positions: int, dtype: torch.dtype) -> LeanRotaryEmbedding | None:
    """A stand-in for a rotary embedding module, or None where the table would be too long, or the module is none."""
    is_rotary = type(module).__name__.endswith("RotaryEmbedding") and not list(module.parameters())
    if not is_rotary or max_positions > MAX_POSITIONS:
        return None
    return LeanRotaryEmbedding(module, max_positions, dtype)
