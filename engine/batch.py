"""One ragged forward: the rows of every session of a step, flattened.

Not here: who is in the batch (the scheduler decides) and what becomes of the logits (acceptance decides).

A session contributes `query_starts[s+1] - query_starts[s]` rows. Its rows are first a chain (tokens that
stand one after another: a prefill chunk, or the last committed token), then, from relative row
`tree_starts[s]` on, a token tree in which row i hangs below row `parents[i]`. A chain draft is part of the
chain; then `tree_starts[s]` equals the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True)
class SessionRows:
    """One session's share of a forward.

    The rows are `token_ids`; the first `num_chain_rows` follow one another from cache index `context_len` on, the
    rest are a tree whose `parents` hold one relative row per tree row (the last chain row is the root). `block_ids`
    must cover `context_len + len(token_ids)` cache indices. Logits are wanted of the last `num_logits_rows` rows.
    """

    token_ids: Sequence[int]
    context_len: int
    block_ids: Sequence[int]
    num_logits_rows: int
    num_chain_rows: int | None = None
    parents: Sequence[int] = ()


def build_batch(sessions: Sequence[SessionRows], block_size: int, device: torch.device | str = "cpu") -> ForwardBatch:
    """Flattens the sessions in the order given. Plain lists and numpy: no torch call per session.

    A block table is as wide as the longest session needs; unused places hold block 0 and are never read.
    """
    if all(len(rows.token_ids) == 1 and rows.num_chain_rows != 0 for rows in sessions):
        return _single_rows(sessions, block_size, device)
    query_starts = np.zeros(len(sessions) + 1, dtype=np.int32)
    query_starts[1:] = np.cumsum([len(rows.token_ids) for rows in sessions])
    num_rows = int(query_starts[-1])
    token_ids = np.empty(num_rows, dtype=np.int64)
    position_ids = np.empty(num_rows, dtype=np.int64)
    slot_mapping = np.empty(num_rows, dtype=np.int64)
    parents = np.zeros(num_rows, dtype=np.int32)
    context_lens = np.array([rows.context_len for rows in sessions], dtype=np.int32)
    tree_starts = np.empty(len(sessions), dtype=np.int32)
    block_tables = np.zeros((len(sessions), max((len(rows.block_ids) for rows in sessions), default=0)), np.int32)
    logits_rows: list[np.ndarray] = []
    for index, rows in enumerate(sessions):
        start, end = int(query_starts[index]), int(query_starts[index + 1])
        count = end - start
        num_chain_rows = count if rows.num_chain_rows is None else rows.num_chain_rows
        token_ids[start:end] = rows.token_ids
        block_tables[index, : len(rows.block_ids)] = rows.block_ids
        cache_index = rows.context_len + np.arange(count)
        blocks = block_tables[index, cache_index // block_size].astype(np.int64)
        slot_mapping[start:end] = blocks * block_size + cache_index % block_size
        position_ids[start:end] = cache_index
        tree_starts[index] = num_chain_rows
        if num_chain_rows < count:
            parents[start + num_chain_rows : end] = rows.parents
            position_ids[start + num_chain_rows : end] = _tree_positions(rows, num_chain_rows)
        logits_rows.append(np.arange(end - rows.num_logits_rows, end))
    wanted = np.concatenate(logits_rows) if logits_rows else np.empty(0, dtype=np.int64)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        token_ids=tensor(token_ids),
        position_ids=tensor(position_ids),
        slot_mapping=tensor(slot_mapping),
        query_starts=tensor(query_starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(block_tables),
        tree_starts=tensor(tree_starts),
        parents=tensor(parents),
        logits_rows=tensor(wanted),
    )


def _single_rows(sessions: Sequence[SessionRows], block_size: int, device: torch.device | str) -> ForwardBatch:
    """One row of each session, as decoding and every further token of a chain have it: nothing of numpy per session, of
    which eight take 80 us."""
    num_rows = len(sessions)
    lens = [rows.context_len for rows in sessions]
    width = max((len(rows.block_ids) for rows in sessions), default=0)
    tables = np.zeros((num_rows, width), dtype=np.int32)
    for row, rows in enumerate(sessions):
        tables[row, : len(rows.block_ids)] = rows.block_ids
    pairs = zip(sessions, lens, strict=True)
    slots = [rows.block_ids[length // block_size] * block_size + length % block_size for rows, length in pairs]
    wanted = [row for row, rows in enumerate(sessions) if rows.num_logits_rows]

    def tensor(values: object, dtype: type[np.signedinteger]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)

    return ForwardBatch(
        token_ids=tensor([rows.token_ids[0] for rows in sessions], np.int64),
        position_ids=tensor(lens, np.int64),
        slot_mapping=tensor(slots, np.int64),
        query_starts=tensor(range(num_rows + 1), np.int32),
        context_lens=tensor(lens, np.int32),
        block_tables=torch.from_numpy(tables).to(device),
        tree_starts=tensor([1] * num_rows, np.int32),
        parents=tensor([0] * num_rows, np.int32),
        logits_rows=tensor(wanted, np.int64),
    )


def _tree_positions(rows: SessionRows, num_chain_rows: int) -> list[int]:
    """Logical positions of the tree rows: one past the parent's. A parent before the tree is its root."""
    root = rows.context_len + num_chain_rows - 1
    positions: list[int] = []
    for parent in rows.parents:
        positions.append(1 + (positions[parent - num_chain_rows] if parent >= num_chain_rows else root))
    return positions
