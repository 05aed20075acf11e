"""The slots of all recurrent layers in memory.

Not here: who owns a slot (table), what is in it (kernels/recurrent/rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.zeroed_memory import zeros
from outrider.kernels.recurrent.rows import LayerStates

# rows; length of a slot's log: the last committed token and the draft's; longer drafts are cut. Half of the largest
# tree that our methods grow (drafting/methods/growing.py); a row costs 1/128 of a Qwen3.5 slot
NUM_LOG_ROWS = 33


@dataclass(frozen=True)
class RecurrentShape:
    """One recurrent layer's shape."""

    module_name: str
    num_window_rows: int  # K - 1 of a short convolution over K rows
    num_channels: int  # of that convolution
    state_shape: tuple[int, ...]  # of the float32 state
    log_width: int  # of a raw row

    def bytes_per_slot(self, dtype: torch.dtype, num_log_rows: int) -> int:
        num_elements = self.num_window_rows * self.num_channels + num_log_rows * self.log_width
        return math.prod(self.state_shape) * torch.float32.itemsize + num_elements * dtype.itemsize


class RecurrentStates:
    """Holds num_slots states of every layer; layers[i] belongs to the mixer with state_idx i."""

    def __init__(
        self,
        shapes: Sequence[RecurrentShape],
        *,
        num_slots: int,
        num_log_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_slots < 1 or num_log_rows < 1:
            raise ValueError(f"num_slots and num_log_rows must be at least 1, not {num_slots} and {num_log_rows}")
        self.num_slots = num_slots
        self.num_log_rows = num_log_rows
        self.layers: list[LayerStates] = [
            LayerStates(
                window=zeros((num_slots, shape.num_window_rows, shape.num_channels), dtype, device),
                state=zeros((num_slots, *shape.state_shape), torch.float32, device),
                log=zeros((num_slots, num_log_rows, shape.log_width), dtype, device),
            )
            for shape in shapes
        ]

    def copy_log_rows(self, sources: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]) -> None:
        """Copies raw rows of all layers; sources and targets: (slot, row of its log)."""
        if not sources:
            return
        device = self.layers[0].log.device
        (from_slots, from_rows), (to_slots, to_rows) = (
            torch.tensor(places, device=device).unbind(1) for places in (sources, targets)
        )
        for layer in self.layers:
            layer.log[to_slots, to_rows] = layer.log[from_slots, from_rows]

    @property
    def num_bytes(self) -> int:
        return sum(layer.window.nbytes + layer.state.nbytes + layer.log.nbytes for layer in self.layers)
