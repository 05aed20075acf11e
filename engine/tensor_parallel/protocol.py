"""What rank 0 tells the other ranks between forwards, over one pipe to each.

Not here: what ranks exchange inside a forward (collectives). A pipe and not a broadcast: an idle rank may wait for
days without a timeout, and learns at once that rank 0 is gone. Only rank 0 taps hidden states, samples and decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import ForwardBatch


@dataclass(frozen=True)
class LoadSpec:
    """What every rank hands to load_model, to the same effect."""

    path: str
    dtype: str
    device: str
    attention_backend: str
    max_model_len: int | None
    num_threads: int


@dataclass(frozen=True)
class MakeCache:
    cache_id: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class DropCache:
    cache_id: int


@dataclass(frozen=True)
class Forward:
    cache_id: int
    arrays: tuple[NDArray[np.int64 | np.int32], ...]  # the fields of a ForwardBatch

    @classmethod
    def of(cls, cache_id: int, batch: ForwardBatch) -> Forward:
        # numpy, not tensors: those would travel as shared memory, which is dear for a few numbers.
        return cls(cache_id, tuple(getattr(batch, field.name).cpu().numpy() for field in fields(ForwardBatch)))

    def batch(self, device: torch.device) -> ForwardBatch:
        return ForwardBatch(*(torch.from_numpy(array).to(device) for array in self.arrays))


@dataclass(frozen=True)
class Move:
    cache_id: int
    source_slots: NDArray[np.int64]
    target_slots: NDArray[np.int64]


@dataclass(frozen=True)
class Stop:
    """The end, in good order."""


Message = MakeCache | DropCache | Forward | Move | Stop
