"""The arguments of paged attention, declared once for its callers and for every kernel.

T rows, S sessions, Hq query heads, Hkv key/value heads, head size D, value size Dv.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from outrider.kernels.errors import KernelArgumentError


class BatchTables(NamedTuple):
    """The positions of a batch's rows and of their contexts; the same for all layers of a forward.

    Row i of session s is row query_starts[s] + i of the batch and has cache index context_lens[s] + i.
    """

    block_tables: torch.Tensor  # int32 [S, B]; cache index i of session s is in block [s, i // block_size]
    context_lens: torch.Tensor  # int32 [S]; cached positions before the session's first row
    query_starts: torch.Tensor  # int32 [S + 1]; half-open row ranges of the sessions
    tree_starts: torch.Tensor  # int32 [S]; first relative row of the tree; the number of rows if there is none
    parents: torch.Tensor  # int32 [T]; relative row of the parent; read only for tree rows


class Scoring(NamedTuple):
    """A layer's rule for turning scores into weights; the same for all forwards."""

    scaling: float
    sliding_window: int | None = None  # visible logical positions, the row's own included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq]; one more logit per head in the softmax denominator (gpt-oss)
    chunk_size: int | None = None  # logical positions; a row sees those of its own chunk, up to itself (Llama 4)

    def window(self) -> tuple[int, int]:
        """(reach, step): a row at logical position p sees max(p + 1 - reach, 0) // step * step and what follows.

        reach 0: everything. A sliding window has step 1, chunks have reach 1. Raises KernelArgumentError.
        """
        for name, size in (("sliding_window", self.sliding_window), ("chunk_size", self.chunk_size)):
            if size is not None and size <= 0:
                raise KernelArgumentError(f"{name}={size} must be positive, or None")
        if self.chunk_size is None:
            return self.sliding_window or 0, 1
        if self.sliding_window is not None:
            raise KernelArgumentError("sliding_window and chunk_size exclude each other")
        return 1, self.chunk_size


class PagedAttention(Protocol):
    """A paged attention kernel."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tables: BatchTables,
        scoring: Scoring,
    ) -> torch.Tensor:
        """query [T, Hq, D] -> [T, Hq, Dv] in the dtype of query.

        key_cache [num_blocks, Hkv, block_size, D] and value_cache [..., Dv] already hold the rows of the call. Both may
        be 8-bit codes (kernels/kv_codes); then the scores are those of codes times scales.
        """
