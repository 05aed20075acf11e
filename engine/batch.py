"""One ragged forward: the rows of every session of a step, flattened.

Not here: who is in the batch (the scheduler decides) and what becomes of the logits (acceptance decides).

A session contributes `query_starts[s+1] - query_starts[s]` rows. Its rows are first a chain (tokens that
stand one after another: a prefill chunk, or the last committed token), then, from relative row
`tree_starts[s]` on, a token tree in which row i hangs below row `parents[i]`. A chain draft is part of the
chain; then `tree_starts[s]` equals the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardBatch:
    """Shapes: T rows in all, S sessions, B blocks per session at most, R rows whose logits are wanted."""

    token_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T]: logical position; in a tree, context + depth
    slot_mapping: torch.Tensor  # int64 [T]: block id * block_size + offset where the row's K and V are written
    query_starts: torch.Tensor  # int32 [S+1]: half-open row ranges of the sessions
    context_lens: torch.Tensor  # int32 [S]: positions in the cache before the session's first row
    block_tables: torch.Tensor  # int32 [S, B]: block ids; row i of session s has cache index context_lens[s] + i
    tree_starts: torch.Tensor  # int32 [S]: first relative row of the tree, = number of rows for a chain
    parents: torch.Tensor  # int32 [T]: relative row of the parent; read only for rows of a tree
    logits_rows: torch.Tensor  # int64 [R]: flattened rows whose logits are wanted, ascending
