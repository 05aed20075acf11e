"""Lean rotary embeddings: cosines and sines from a table, two index operations instead of eight.

The model's own module computes the table for positions 0 to max_model_len. Not here: when modules are replaced (lean)
and the rotation (kernels/rotary).
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.model.lean import lean_check
from outrider.engine.model.lean.module_calls import ModuleCall

# positions; longest table: 64 MiB for cos and sin of 128 bf16 elements; longer contexts keep transformers' module
MAX_POSITIONS = 131_072
_CHUNK = 4096


class LeanRotaryEmbedding(torch.nn.Module):
    """Replaces a module that maps (x, position_ids [1, T] or [3, 1, T], ...) -> (cos [1, T, R], sin [1, T, R])."""

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
        # Multimodal models have a plane of positions per axis; for text the planes are equal.
        positions = position_ids.flatten(0, -2)[0]
        try:
            return cos.index_select(0, positions)[None], sin.index_select(0, positions)[None]
        # Past the end of the table, the original module computes the position. The engine never asks for one.
        except (IndexError, RuntimeError):
            return self.original(x, position_ids, *args, **kwargs)

    def _compute(self, x: torch.Tensor, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for start in range(0, self._max_positions, _CHUNK):
            positions = torch.arange(start, min(start + _CHUNK, self._max_positions), device=x.device)[None]
            parts.append(self.original(x, positions, *args, **kwargs))
        cos, sin = (torch.cat([part[side][0] for part in parts]).contiguous() for side in (0, 1))
        return cos, sin


def is_rotary(module: torch.nn.Module, max_positions: int) -> bool:
    """Returns whether a module can be replaced by a table of this length."""
    named = type(module).__name__.endswith("RotaryEmbedding") and not list(module.parameters())
    return named and max_positions <= MAX_POSITIONS


def lean_rotary(
    module: torch.nn.Module, calls: list[ModuleCall], max_positions: int, dtype: torch.dtype
) -> LeanRotaryEmbedding | None:
    """Returns the replacement of a rotary embedding; None if one of the calls would return something else."""
    replacement = LeanRotaryEmbedding(module, max_positions, dtype)
    for call in calls:
        if not lean_check.is_close(replacement(*call.args, **call.kwargs), module(*call.args, **call.kwargs)):
            return None
    return replacement
