"""Messages from rank 0 to the other ranks between forwards, over one pipe to each.

A pipe, not a broadcast: an idle rank waits without a timeout and notices at once if rank 0 ends. Only rank 0 taps
hidden states, samples and decides. Not here: exchanges inside a forward (collectives).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.attention.batch import ForwardBatch


@dataclass(frozen=True)
class LoadSpec:
    """The arguments of load_model, equal on every rank."""

    path: str
    dtype: str
    device: str
    attention_backend: str
    max_model_len: int | None
    num_threads: int
    kv_cache_dtype: str = "auto"
    packed_arithmetic: str = "auto"


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
        # numpy, not tensors: these would be sent through shared memory, expensive for a few numbers.
        return cls(cache_id, tuple(tensor.cpu().numpy() for tensor in batch.tensors()))

    def batch(self, device: torch.device) -> ForwardBatch:
        return ForwardBatch(*(torch.from_numpy(array).to(device) for array in self.arrays))


@dataclass(frozen=True)
class Move:
    cache_id: int
    source_slots: NDArray[np.int64]
    target_slots: NDArray[np.int64]


@dataclass(frozen=True)
class Stop:
    """Ends the rank in an orderly way."""


Message = MakeCache | DropCache | Forward | Move | Stop
