"""Token sequences through a hybrid's ModelRunner in pieces, drafts included, with blocks and slots of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.recurrent.table import SessionState, StateTable
from outrider.engine.run.runner import ModelRunner


@dataclass
class Round:
    """The next tokens of a sequence in a forward, then a draft.

    parents: of the draft's nodes, -1: the last of the tokens; empty: a chain. accepted: nodes that are the sequence's
    own next tokens, in order.
    """

    num_tokens: int
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()
    accepted: Sequence[int] = ()


def with_trees(tokens: Sequence[int], depth: int, vocab_size: int) -> list[Round]:
    """A prompt of nine tokens, then trees of that depth: a wrong sibling before each right node, and a child of the
    first sibling.
    """
    position, rounds = 9, [Round(9)]
    while position < len(tokens):
        levels = min(depth, len(tokens) - position - 1)
        path = tokens[position + 1 : position + 1 + levels]
        nodes = [node for token in path for node in ((token + 1) % vocab_size, token)]
        parents = [2 * level - 1 for level in range(levels) for _ in range(2)]
        if levels:
            nodes, parents = [*nodes, 7], [*parents, 0]
        rounds.append(Round(1, nodes, parents, [2 * level + 1 for level in range(levels)]))
        position += 1 + levels
    return rounds


@dataclass
class HybridSequence:
    runner: ModelRunner
    table: StateTable
    token_ids: list[int]
    block_ids: list[int]
    state: SessionState = field(init=False)
    logits: list[torch.Tensor] = field(default_factory=list)  # of each position that is computed

    def __post_init__(self) -> None:
        self.state = self.table.open()

    @property
    def num_computed(self) -> int:
        return self.state.position

    def rows(self, each: Round) -> SessionRows:
        start = self.num_computed
        token_ids = [*self.token_ids[start : start + each.num_tokens], *each.draft]
        slot_out = self.table.reserve(self.state)
        state = StateRows(self.state.slot, self.state.kept_rows, slot_out, each.num_tokens)
        if not each.parents:
            return SessionRows(token_ids, start, self.block_ids, len(token_ids), state=state)
        parents = [each.num_tokens + parent for parent in each.parents]
        return SessionRows(token_ids, start, self.block_ids, len(token_ids), each.num_tokens, parents, state)

    def settle(self, each: Round, logits: torch.Tensor) -> None:
        """logits [rows, V]"""
        first = self.num_computed + each.num_tokens
        assert [each.draft[node] for node in each.accepted] == self.token_ids[first : first + len(each.accepted)]
        self.logits += [*logits[: each.num_tokens], *(logits[each.num_tokens + node] for node in each.accepted)]
        moves = [(first + node, first + depth) for depth, node in enumerate(each.accepted) if node != depth]
        sources, targets = (torch.tensor([self._slot(move[side]) for move in moves]).long() for side in (0, 1))
        self.runner.cache.move(sources, targets)
        self.table.settle(self.state, first - 1, [0, *(1 + node for node in each.accepted)])

    def rewind(self, position: int) -> None:
        self.table.rewind(self.state, position)
        del self.logits[self.num_computed :]

    def _slot(self, cache_index: int) -> int:
        size = self.runner.cache.block_size
        return self.block_ids[cache_index // size] * size + cache_index % size


def step(rounds: Sequence[tuple[HybridSequence, Round]]) -> None:
    """One forward."""
    runner = rounds[0][0].runner
    rows = [sequence.rows(each) for sequence, each in rounds]
    logits = runner.forward(build_batch(rows, runner.cache.block_size)).logits
    parts = logits.split([len(each.token_ids) for each in rows])
    for (sequence, each), part in zip(rounds, parts, strict=True):
        sequence.settle(each, part)
