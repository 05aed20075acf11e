"""Running sequences through a ModelRunner in pieces, for tests: who writes what where, in plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.run.runner import ModelRunner


@dataclass
class CachedSequence:
    """A token sequence with blocks of its own and the number of its tokens that are in the cache."""

    token_ids: list[int]
    block_ids: list[int]
    num_cached: int = 0

    def rows(self, count: int) -> SessionRows:
        """The next `count` tokens as a chain; all logits wanted."""
        token_ids = self.token_ids[self.num_cached : self.num_cached + count]
        rows = SessionRows(token_ids, self.num_cached, self.block_ids, len(token_ids))
        self.num_cached += len(token_ids)
        return rows


def scattered_blocks(num_blocks: int, num_owners: int, seed: int = 0) -> list[list[int]]:
    """All block ids, shuffled and dealt out evenly."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    share = num_blocks // num_owners
    return [order[owner * share : (owner + 1) * share] for owner in range(num_owners)]


def run_step(runner: ModelRunner, sessions: Sequence[SessionRows]) -> list[torch.Tensor]:
    """One forward; returns each session's logits [num_logits_rows, V]."""
    batch = build_batch(sessions, runner.cache.block_size)
    logits = runner.forward(batch).logits
    return list(logits.split([rows.num_logits_rows for rows in sessions]))
