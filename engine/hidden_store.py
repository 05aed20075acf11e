"""Hidden states of every cached position, kept in the slots of the KV cache.

What drafters such as EAGLE need of the target, kept where it cannot get lost: a session that starts on a cached
prefix, and a drafter that joins late or has been restarted, find the rows of positions that were computed long ago.

Not here: who is sent which rows (verifier_service/hidden_states) and how they leave the model (runner).
A layer is kept from the moment on that somebody first wants it; its memory is `num_slots * width` elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch


class HiddenStateStore:
    """Layers as transformers numbers them (see `ModelRunner.forward`); slots as in `PagedKVCache`."""

    def __init__(self, *, num_slots: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.width = width
        self.dtype = dtype
        self._num_slots = num_slots
        self._device = device
        self._rows: dict[int, torch.Tensor] = {}
        # Slots written since the layer is kept. What stood in them before is another sequence's, or nothing.
        self._written: dict[int, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._rows)

    def keep(self, layers: Sequence[int]) -> None:
        """Begins to keep layers; those that are kept already stay as they are."""
        for layer in layers:
            if layer not in self._rows:
                self._rows[layer] = torch.zeros((self._num_slots, self.width), dtype=self.dtype, device=self._device)
                self._written[layer] = np.zeros(self._num_slots, dtype=np.bool_)

    def write(self, hidden: Mapping[int, torch.Tensor], slots: torch.Tensor) -> None:
        """hidden[layer] [T, width] for every kept layer, slots int64 [T]."""
        places = slots.cpu().numpy()
        for layer, rows in self._rows.items():
            rows[slots] = hidden[layer]
            self._written[layer][places] = True

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copies slots (int64 [N] each); all sources are read before any target is written."""
        sources, targets = source_slots.cpu().numpy(), target_slots.cpu().numpy()
        for layer, rows in self._rows.items():
            rows[target_slots] = rows[source_slots]
            self._written[layer][targets] = self._written[layer][sources]

    def num_missing(self, layers: Sequence[int], slots: Sequence[int]) -> int:
        """How many slots at the start have to be left out so that all the others are there, in every layer."""
        places = np.asarray(slots, dtype=np.int64)
        there = np.ones(len(places), dtype=np.bool_)
        for layer in layers:
            there &= self._written[layer][places]
        absent = np.flatnonzero(~there)
        return int(absent[-1]) + 1 if len(absent) else 0

    def read(self, layers: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """[len(slots), len(layers) * width], a copy; the layers of a slot stand side by side."""
        places = torch.tensor(slots, dtype=torch.int64, device=self._device)
        return torch.cat([self._rows[layer][places] for layer in layers], dim=1)
