"""The choice of a sparse attention: the cached keys that each row attends, by the scores of an indexer.

DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1). A row's choice is a function of its scores
alone: the largest, and of equal ones the earliest. MiniMax-M3 chooses blocks of keys instead, for each key/value head
on its own. The rows are attended as sessions of one row and one key/value head each, whose blocks are the chosen slots
in logical order. So a row that has chosen everything has the bits of an attention without a choice.
Not here: the indexer (engine/model/sparse_indexer), its scores (kernels/index_scores).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outrider.kernels.index_scores.reference import IndexScores
from outrider.kernels.paged_attention.arguments import BatchTables

# attribute of attention modules with an indexer: elements of its keys
INDEX_DIM = "index_dim"
# scores computed at a time; bounds the memory of a long prompt (16 MiB of scores, and as much again to rank them)
_MAX_SCORES = 1 << 22


@dataclass(frozen=True)
class Choice:
    """What the rows of a forward attend. tables None: all that they see.

    Else sessions for `by_head`: slots in the place of blocks, for each row its key/value heads one after the other.
    """

    tables: BatchTables | None = None
    plans: dict[Any, Any] = field(default_factory=dict)  # kept by the attention kernel for these tables


EVERYTHING = Choice()


class Rule(Protocol):
    """Which of the keys that a row sees it chooses."""

    @property
    def num_chosen(self) -> int:
        """Returns the most keys of a row."""
        ...

    def chosen(self, scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Maps scores [T, L] of the slots of VisibleKeys -> bool [T, L]. A score that is no number is the least."""
        ...


@dataclass(frozen=True)
class TopKeys:
    """Chooses the keys of the largest scores."""

    num_chosen: int

    def chosen(self, scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return _largest(scores, slots >= 0, self.num_chosen)


@dataclass(frozen=True)
class TopBlocks:
    """Chooses the blocks of the largest scores, of keys in logical order: a block has the largest of its keys'.

    The row's own block and those before it, num_local together, are chosen first.
    """

    block_size: int
    num_blocks: int
    num_local: int

    @property
    def num_chosen(self) -> int:
        return self.num_blocks * self.block_size

    def chosen(self, scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        size, length = self.block_size, scores.shape[1]
        padded = torch.nn.functional.pad(scores.nan_to_num(nan=-torch.inf), (0, -length % size), value=-torch.inf)
        of_blocks = padded.reshape(len(padded), -1, size).amax(2)
        block = torch.arange(of_blocks.shape[1], device=scores.device)
        own = ((slots >= 0).sum(1, keepdim=True) - 1) // size
        of_blocks.masked_fill_((block > own - self.num_local) & (block <= own), torch.inf)
        is_chosen = _largest(of_blocks, block <= own, self.num_blocks)
        return is_chosen.repeat_interleave(size, 1)[:, :length] & (slots >= 0)


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
    visible: VisibleKeys,
    rule: Rule,
    index_scores: IndexScores,
    num_kv_heads: int,
) -> Choice:
    """Returns what each of T rows attends. query [T, C, H, D], weights [T, C, H]: as IndexScores has them, for each of
    a row's C choices, which the key/value heads share evenly. index_cache [blocks, 1, block, D] has the rows' keys.
    """
    num_rows, num_choices = query.shape[:2]
    keys, block_size = index_cache[:, 0].flatten(0, 1), index_cache.shape[2]
    chosen = torch.zeros((num_rows * num_choices, rule.num_chosen), dtype=torch.int32, device=query.device)
    counts = torch.zeros(len(chosen), dtype=torch.int32, device=query.device)
    at_once = max(1, _MAX_SCORES // (num_choices * int(visible.counts.max())))
    for begin in range(0, num_rows, at_once):
        part = slice(begin, min(begin + at_once, num_rows))
        slots = visible.slots(part.start, part.stop).repeat_interleave(num_choices, 0)
        is_chosen = rule.chosen(
            index_scores(query[part].flatten(0, 1), weights[part].flatten(0, 1), keys, slots), slots
        )
        of_part = slice(part.start * num_choices, part.stop * num_choices)
        counts[of_part] = is_chosen.sum(1).int()
        rows, places = is_chosen.nonzero(as_tuple=True)
        chosen[of_part][rows, is_chosen.cumsum(1)[rows, places] - 1] = slots[rows, places]
    chosen, counts = (part.repeat_interleave(num_kv_heads // num_choices, 0) for part in (chosen, counts))
    head = torch.arange(num_kv_heads, dtype=torch.int32, device=query.device).repeat(num_rows)[:, None]
    num_sessions = len(chosen)
    return Choice(
        BatchTables(
            (chosen // block_size * num_kv_heads + head) * block_size + chosen % block_size,
            context_lens=counts - 1,
            query_starts=torch.arange(num_sessions + 1, dtype=torch.int32, device=query.device),
            tree_starts=torch.ones(num_sessions, dtype=torch.int32, device=query.device),
            parents=torch.zeros(num_sessions, dtype=torch.int32, device=query.device),
        )
    )


def _largest(scores: torch.Tensor, may_be: torch.Tensor, count: int) -> torch.Tensor:
    """Returns which are the `count` largest scores [T, L] of those that may be: of equal ones the earliest."""
    count = min(count, scores.shape[1])
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = scores.topk(count, dim=1).values[:, -1:]
    above, tied = (scores > least) & may_be, (scores == least) & may_be
    return above | (tied & (tied.cumsum(1) <= count - above.sum(1, keepdim=True)))


def by_head(cache: torch.Tensor) -> torch.Tensor:
    """Returns a cache [blocks, Hkv, block size, D] as one of blocks of one slot of one head; a view."""
    return cache.flatten(0, 2)[:, None, None]
