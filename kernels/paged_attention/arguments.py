"""The arguments of paged attention, declared once for its callers and for every kernel.

T rows, S sessions, Hq query heads, Hkv key/value heads, head size D, value size Dv.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class BatchTables(NamedTuple):
    """Where the rows of a batch and their contexts lie; the same for all layers of a forward.

    Row i of session s is row query_starts[s] + i of the batch and has cache index context_lens[s] + i.
    """

    block_tables: torch.Tensor  # int32 [S, B]; cache index i of session s is in block [s, i // block_size]
    context_lens: torch.Tensor  # int32 [S]; cached positions before the session's first row
    query_starts: torch.Tensor  # int32 [S + 1]; half-open row ranges of the sessions
    tree_starts: torch.Tensor  # int32 [S]; first relative row of the tree; the number of rows if there is none
    parents: torch.Tensor  # int32 [T]; relative row of the parent; read only for tree rows


class Scoring(NamedTuple):
    """How a layer turns scores into weights; the same for all forwards."""

    scaling: float
    sliding_window: int | None = None  # visible logical positions, the row's own included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq]; one more logit per head in the softmax denominator (gpt-oss)


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

        key_cache [num_blocks, Hkv, block_size, D] and value_cache [..., Dv] already hold the rows of the call.
        """
