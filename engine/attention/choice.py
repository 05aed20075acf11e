"""The choice of a sparse attention: the cached keys that each row attends, by the scores of an indexer.

DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1). A row's choice is a function of its scores
alone: the largest, and of equal ones the earliest. The rows are attended as sessions of one row each, whose blocks are
the chosen slots in logical order. So a row that has chosen everything has the bits of an attention without a choice.
Not here: the indexer (engine/model/sparse_indexer), its scores (kernels/index_scores).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.kernels.index_scores.reference import IndexScores
from outrider.kernels.paged_attention.arguments import BatchTables

# attribute of attention modules with an indexer: elements of its keys
INDEX_DIM = "index_dim"
# scores computed at a time; bounds the memory of a long prompt (16 MiB of scores, and as much again to rank them)
_MAX_SCORES = 1 << 22


@dataclass(frozen=True)
class Choice:
    """What the rows of a forward attend. tables None: all that they see; else slots in the place of blocks."""

    tables: BatchTables | None = None
    plans: dict[Any, Any] = field(default_factory=dict)  # kept by the attention kernel for these tables


EVERYTHING = Choice()


class VisibleKeys:
    """The slots of what each row of a batch sees, in logical order."""

    def __init__(self, tables: BatchTables, block_size: int) -> None:
        self._tables, self._block_size = tables, block_size
        starts = tables.query_starts.long()
        num_rows = starts.diff()
        self._session = torch.repeat_interleave(torch.arange(len(num_rows), device=starts.device), num_rows)
        row = torch.arange(len(self._session), device=starts.device) - starts[self._session]
        context, tree_start = tables.context_lens[self._session], tables.tree_starts[self._session]
        self._num_shared = context + torch.minimum(row + 1, tree_start)  # before the tree
        self._paths = self._tree_paths(row.tolist(), context.tolist(), tree_start.tolist())
        self.counts = self._num_shared.clone()
        for tree_row, path in self._paths.items():
            self.counts[tree_row] += len(path)

    def _tree_paths(self, rows: list[int], contexts: list[int], tree_starts: list[int]) -> dict[int, list[int]]:
        """Maps each tree row -> the cache indices of its ancestors in the tree, and its own."""
        parents = self._tables.parents.tolist()
        paths: dict[int, list[int]] = {}
        for index, (row, context, tree_start) in enumerate(zip(rows, contexts, tree_starts, strict=True)):
            if row >= tree_start:
                first_row, parent = index - row, parents[index]
                before = paths[first_row + parent] if parent >= tree_start else []
                paths[index] = [*before, context + row]
        return paths

    def slots(self, begin: int, end: int) -> torch.Tensor:
        """Returns int32 [end - begin, most visible keys], -1 beyond what a row sees."""
        device = self.counts.device
        positions = torch.arange(int(self.counts[begin:end].max()), device=device)
        session = self._session[begin:end]
        slots = self._slots_of(session[:, None], positions)
        slots.masked_fill_(positions >= self._num_shared[begin:end, None], -1)
        for row in range(begin, end):
            path = self._paths.get(row)
            if path is not None:
                first = int(self._num_shared[row])
                indices = torch.tensor(path, device=device)
                slots[row - begin, first : first + len(path)] = self._slots_of(self._session[row], indices)
        return slots

    def _slots_of(self, session: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        blocks = self._tables.block_tables[session, indices // self._block_size]
        return blocks * self._block_size + (indices % self._block_size).int()


def choose(
    query: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    tables: BatchTables,
    num_chosen: int,
    index_scores: IndexScores,
) -> Choice:
    """Returns what each of T rows attends. query, weights: as IndexScores has them; index_cache [blocks, 1, block, D].

    The cache already holds the keys of the batch's rows.
    """
    lengths = tables.context_lens + tables.query_starts.diff()
    if not len(lengths) or int(lengths.max()) <= num_chosen:
        return EVERYTHING
    num_rows, device = len(query), query.device
    visible = VisibleKeys(tables, index_cache.shape[2])
    keys = index_cache[:, 0].flatten(0, 1)
    chosen = torch.zeros((num_rows, num_chosen), dtype=torch.int32, device=device)
    at_once = max(1, _MAX_SCORES // int(visible.counts.max()))
    for begin in range(0, num_rows, at_once):
        end = min(begin + at_once, num_rows)
        slots = visible.slots(begin, end)
        scores = index_scores(query[begin:end], weights[begin:end], keys, slots)
        best = top_slots(scores, slots, num_chosen)
        chosen[begin:end, : best.shape[1]] = best
    return Choice(
        BatchTables(
            chosen,
            context_lens=visible.counts.clamp(max=num_chosen).int() - 1,
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            tree_starts=torch.ones(num_rows, dtype=torch.int32, device=device),
            parents=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )
    )


def top_slots(scores: torch.Tensor, slots: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Returns the slots of the largest scores [T, L] in logical order: int32 [T, min(L, num_chosen)], then zeros.

    Of equal scores the earliest are chosen; a score that is no number is the least. Slots of -1 are never chosen.
    """
    num_chosen = min(num_chosen, scores.shape[1])
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = scores.topk(num_chosen, dim=1).values[:, -1:]
    above, tied = (scores > least) & (slots >= 0), (scores == least) & (slots >= 0)
    is_chosen = above | (tied & (tied.cumsum(1) <= num_chosen - above.sum(1, keepdim=True)))
    rows, places = is_chosen.nonzero(as_tuple=True)
    best = slots.new_zeros((len(slots), num_chosen))
    best[rows, is_chosen.cumsum(1)[rows, places] - 1] = slots[rows, places]
    return best


def by_slot(cache: torch.Tensor) -> torch.Tensor:
    """Returns a cache [blocks, Hkv, block size, D] as one of blocks of one slot; a view if it has one head."""
    return cache.transpose(1, 2).flatten(0, 1)[:, :, None]
