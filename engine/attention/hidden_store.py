"""Hidden states of cached positions, stored by KV cache slot, for drafters such as EAGLE.

Sessions that start on a cached prefix and restarted drafters find the rows of positions computed earlier. A layer is
stored from its first request on, in `num_slots * width` elements, which take memory as they are written.
Not here: who is sent which rows (verifier_service), and how they leave the model (runner).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from outrider.engine.uploads import upload
from outrider.engine.zeroed_memory import zeros


class HiddenStateStore:
    """Stores hidden states by layer, numbered as in `ModelRunner.forward`, and by slot, as in `PagedKVCache`."""

    def __init__(self, *, num_slots: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.width = width
        self.dtype = dtype
        self._num_slots = num_slots
        self._device = torch.device(device)
        self._rows: dict[int, torch.Tensor] = {}
        # The same memory on the CPU.
        self._numbers: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]] = {}
        # Slots written since the layer has been stored; rows of other slots are not valid.
        self._written: dict[int, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._rows)

    def keep(self, layers: Sequence[int]) -> None:
        """Starts storing layers; layers already stored are unchanged."""
        for layer in layers:
            if layer not in self._rows:
                rows = zeros((self._num_slots, self.width), self.dtype, self._device)
                self._rows[layer] = rows
                if rows.device.type == "cpu":
                    self._numbers[layer] = _numbers(rows)
                self._written[layer] = np.zeros(self._num_slots, dtype=np.bool_)

    def write(self, hidden: Mapping[int, torch.Tensor], slots: torch.Tensor) -> None:
        """Writes hidden[layer] [T, width] of every stored layer to slots, int64 [T]."""
        indices = slots.cpu().numpy()
        places = upload(indices, self._device) if len(self._numbers) < len(self._rows) else slots
        for layer, rows in self._rows.items():
            if layer in self._numbers:
                self._numbers[layer][indices] = _numbers(hidden[layer])
            else:
                rows[places] = hidden[layer]
            self._written[layer][indices] = True

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copies slots (int64 [N] each); reads all sources before it writes any target."""
        sources, targets = source_slots.cpu().numpy(), target_slots.cpu().numpy()
        for layer, rows in self._rows.items():
            rows[target_slots] = rows[source_slots]
            self._written[layer][targets] = self._written[layer][sources]

    def num_missing(self, layers: Sequence[int], slots: Sequence[int]) -> int:
        """Returns the length of the shortest prefix of slots after which every slot is stored in every layer."""
        indices = np.asarray(slots, dtype=np.int64)
        is_stored = np.ones(len(indices), dtype=np.bool_)
        for layer in layers:
            is_stored &= self._written[layer][indices]
        missing = np.flatnonzero(~is_stored)
        return int(missing[-1]) + 1 if len(missing) else 0

    def read(self, layers: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """Returns a copy [len(slots), len(layers) * width]; layers are concatenated."""
        if all(layer in self._numbers for layer in layers):
            found = torch.empty(len(slots), len(layers) * self.width, dtype=self.dtype)
            parts = _numbers(found).reshape(len(slots), len(layers), self.width)
            for place, layer in enumerate(layers):
                parts[:, place] = self._numbers[layer][slots]
            return found
        indices = upload(np.asarray(slots, dtype=np.int64), self._device)
        return torch.cat([self._rows[layer][indices] for layer in layers], dim=1)


def _numbers(rows: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]:
    """Views CPU rows as numpy integers: numpy has no bfloat16, but copies a few rows in a fifth of torch's time."""
    return rows.view(torch.int16 if rows.element_size() == 2 else torch.int32).numpy()
