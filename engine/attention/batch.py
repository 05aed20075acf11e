"""The batch of one ragged forward: the rows of all sessions of a step, flattened.

A session has `query_starts[s+1] - query_starts[s]` rows: first a chain (a prefill chunk, or the last committed token
and a chain draft), then, from relative row `tree_starts[s]` on, a token tree in which `parents[i]` is the parent of row
i. Without a tree `tree_starts[s]` equals the number of rows.

Not here: who is in the batch (scheduler), and the use of the logits (acceptance).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.engine.attention.block_manager import slots_of
from outrider.engine.recurrent.rows import StateRows, recurrent_rows
from outrider.kernels.paged_attention.arguments import BatchTables
from outrider.kernels.recurrent.rows import RecurrentRows

# rows; up to here Python's lists are faster than numpy's calls, of which each session needs several
_FEW_ROWS = 96


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one ragged forward.

    Shapes: T rows, S sessions, at most B blocks per session, R rows whose logits are wanted.
    """

    token_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T]: logical position; in a tree, context + depth
    slot_mapping: torch.Tensor  # int64 [T]: block id * block_size + offset, where the row's K and V are written
    query_starts: torch.Tensor  # int32 [S+1]: half-open row ranges of the sessions
    context_lens: torch.Tensor  # int32 [S]: cached positions before the session's first row
    block_tables: torch.Tensor  # int32 [S, B]: block ids; row i of session s has cache index context_lens[s] + i
    tree_starts: torch.Tensor  # int32 [S]: first relative row of the tree; the number of rows if there is none
    parents: torch.Tensor  # int32 [T]: relative row of the parent; read only for tree rows
    logits_rows: torch.Tensor  # int64 [R]: rows with wanted logits, ascending
    recurrent: RecurrentRows | None = field(default=None, kw_only=True)  # of a model with recurrent layers

    @functools.cached_property
    def attention_tables(self) -> BatchTables:
        """Returns the part that paged attention reads."""
        return BatchTables(self.block_tables, self.context_lens, self.query_starts, self.tree_starts, self.parents)

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors but `recurrent`'s, in field order: without recurrent layers, the whole batch."""
        return [getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "recurrent"]

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ForwardBatch:
        """Returns a batch with `function` applied to every tensor, those of `recurrent` included."""
        recurrent = None if self.recurrent is None else RecurrentRows(*map(function, self.recurrent.tensors()))
        return ForwardBatch(*map(function, self.tensors()), recurrent=recurrent)


@dataclass(frozen=True)
class SessionRows:
    """One session's share of a forward.

    `token_ids`: the rows; the first `num_chain_rows` are a chain from cache index `context_len` on, the rest a tree.
    `parents`: one relative row per tree row (the last chain row is the root). `block_ids` must cover `context_len +
    len(token_ids)` cache indices. Logits are wanted for the last `num_logits_rows` rows. `state`: only for models with
    recurrent layers.
    """

    token_ids: Sequence[int]
    context_len: int
    block_ids: Sequence[int]
    num_logits_rows: int
    num_chain_rows: int | None = None
    parents: Sequence[int] = ()
    state: StateRows | None = None


def build_batch(sessions: Sequence[SessionRows], block_size: int, device: torch.device | str = "cpu") -> ForwardBatch:
    """Flattens the sessions in order, without a torch call per session.

    Block tables are as wide as the longest session needs; unused entries are 0 and never read.
    """
    are_chains = all(rows.num_chain_rows in (None, len(rows.token_ids)) for rows in sessions)
    if are_chains and sum(len(rows.token_ids) for rows in sessions) <= _FEW_ROWS:
        return _chains_of_few_rows(sessions, block_size, device)
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
        recurrent=_recurrent(sessions, device),
    )


def _recurrent(sessions: Sequence[SessionRows], device: torch.device | str) -> RecurrentRows | None:
    """Returns the recurrent rows; None if a session has no state: the first recurrent layer then refuses the batch."""
    states = [rows.state for rows in sessions if rows.state is not None]
    if len(states) < len(sessions) or not states:
        return None
    return recurrent_rows(
        states, [len(rows.token_ids) for rows in sessions], [rows.parents for rows in sessions], device
    )


def _chains_of_few_rows(sessions: Sequence[SessionRows], block_size: int, device: torch.device | str) -> ForwardBatch:
    """Builds the batch of a decoding step without numpy per session, which takes longer (log: 20a6f59)."""
    counts = [len(rows.token_ids) for rows in sessions]
    starts = [0, *itertools.accumulate(counts)]
    width = max((len(rows.block_ids) for rows in sessions), default=0)
    tables = np.zeros((len(sessions), width), dtype=np.int32)
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    for index, rows in enumerate(sessions):
        tables[index, : len(rows.block_ids)] = rows.block_ids
        own = range(rows.context_len, rows.context_len + counts[index])
        positions.extend(own)
        slots.extend(slots_of(rows.block_ids, own, block_size))
        wanted.extend(range(starts[index + 1] - rows.num_logits_rows, starts[index + 1]))

    def tensor(values: object, dtype: type[np.signedinteger]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)

    return ForwardBatch(
        token_ids=tensor([token for rows in sessions for token in rows.token_ids], np.int64),
        position_ids=tensor(positions, np.int64),
        slot_mapping=tensor(slots, np.int64),
        query_starts=tensor(starts, np.int32),
        context_lens=tensor([rows.context_len for rows in sessions], np.int32),
        block_tables=torch.from_numpy(tables).to(device),
        tree_starts=tensor(counts, np.int32),
        parents=torch.zeros(starts[-1], dtype=torch.int32, device=device),
        logits_rows=tensor(wanted, np.int64),
        recurrent=_recurrent(sessions, device),
    )


def _tree_positions(rows: SessionRows, num_chain_rows: int) -> list[int]:
    """Returns the logical position of each tree row: one past its parent's. A parent before the tree means the root."""
    root = rows.context_len + num_chain_rows - 1
    positions: list[int] = []
    for parent in rows.parents:
        positions.append(1 + (positions[parent - num_chain_rows] if parent >= num_chain_rows else root))
    return positions
