"""One session's proposal while it grows.

A chain takes one token at a time. A tree grows as in EAGLE-2 (Li et al. 2024): each depth expands the few nodes with
the best joint confidence, and the best nodes overall are proposed. In rejection mode, dropping a sampled node because
of its token would bias the output, so the tree's shape is fixed beforehand (sampled_tree.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from outrider.drafting.growth.choice import draft_law, ranked_guesses, samples
from outrider.drafting.growth.laws import draw_distinct, propose_rng
from outrider.drafting.growth.sampled_tree import sampled_shape
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.chains import ChainDraws, DrawnToken
from outrider.engine.sampling.coupling import index_key
from outrider.engine.sampling.laws import LogitsProcessor, Row
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw

T = TypeVar("T")
ROOT = -1
# nodes; number expanded per depth where each costs a row of a forward, and most children of each, unless the step sets
# them
BEAM_WIDTH = 6
MAX_BRANCHES = 4


@dataclass(frozen=True)
class Node:
    """A draft token. joint: product of the confidences on its path. rank: its rank among its siblings."""

    token_id: int
    parent: int
    depth: int
    confidence: float
    joint: float
    law: SparseLaw | None
    rank: int = 0


@dataclass
class Draft:
    """A growing proposal. frontier: positions (ROOT, or indices of `nodes`) that need logits next; empty when done."""

    session: DraftSession
    processor: LogitsProcessor
    max_nodes: int
    max_depth: int
    max_branches: int = 1
    beam_width: int = BEAM_WIDTH
    nodes: list[Node] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])

    def __post_init__(self) -> None:
        spec = self.session.spec
        self._output = self.session.output_token_ids
        self._samples = samples(spec)
        if min(self.max_nodes, self.max_depth) <= 0:
            self.stop()

    @functools.cached_property
    def _rng(self) -> np.random.Generator:
        return propose_rng(self.session.spec.stream_key, self.session.spec.epoch, self.session.committed_len)

    @property
    def is_chain(self) -> bool:
        return self.max_branches == 1

    @property
    def depth(self) -> int:
        """Counts the tokens between the committed ones and those that will follow the frontier."""
        return 0 if not self.frontier or self.frontier[0] == ROOT else self.nodes[self.frontier[0]].depth

    @property
    def max_rows(self) -> int:
        """Returns an upper bound of the number of `rows`."""
        return self.max_nodes if self.is_chain else self.beam_width * self.max_depth

    @property
    def is_plain_chain(self) -> bool:
        """Returns whether each token is sampled, raced or an argmax, without processors that read earlier tokens."""
        return self.is_chain and self.processor.is_plain

    def chain_draws(self) -> ChainDraws:
        """Returns the parameters and randomness to draw a plain chain's tokens with, at the maximum length.

        Consumes the proposal's randomness as `grow` would: call it once.
        """
        spec, num_tokens, first = self.session.spec, min(self.max_nodes, self.max_depth), len(self._output)
        keys = np.zeros((num_tokens, 2), dtype=np.uint32)
        if not self._samples and not spec.sampling_params.greedy:
            keys[:] = [index_key(spec.stream_key, first + depth) for depth in range(num_tokens)]
        # One integer per token, as in `draw_distinct`: the counts of a distribution sum to LAW_TOTAL.
        positions = self._rng.integers(LAW_TOTAL, size=num_tokens) if self._samples else None
        return ChainDraws(spec.sampling_params, keys, positions)

    def take_chain(self, chain: Sequence[DrawnToken]) -> None:
        """Takes a whole chain drawn elsewhere, as `grow` would have drawn it."""
        position = ROOT
        for drawn in chain:
            position = self._add(position, drawn.token_id, drawn.share, drawn.law)
        self.stop()

    def rows(self) -> list[int]:
        """Returns the frontier's nodes and their ancestors, parents first: the rows that a net must compute for it."""
        wanted: set[int] = set()
        for position in self.frontier:
            while position != ROOT and position not in wanted:
                wanted.add(position)
                position = self.nodes[position].parent
        return sorted(wanted)

    def frontier_of(self, results: Sequence[T]) -> list[T]:
        """Picks the frontier's results, in its order, from one result per row of `rows`."""
        by_position = dict(zip(self.rows(), results, strict=True))
        return [by_position[position] for position in self.frontier]

    def parents_of(self, positions: Sequence[int]) -> list[int]:
        """Returns, for nodes from `rows`, the index of each one's parent among them, or ROOT."""
        index = {position: row for row, position in enumerate(positions)} | {ROOT: ROOT}
        return [index[self.nodes[position].parent] for position in positions]

    def stop(self) -> None:
        """Stops growing; what has grown is proposed."""
        self.frontier = []

    def path(self, position: int) -> list[int]:
        """Returns the token ids from the root to a position."""
        tokens: list[int] = []
        while position != ROOT:
            tokens.append(self.nodes[position].token_id)
            position = self.nodes[position].parent
        return tokens[::-1]

    def grow(self, logits: Sequence[Row]) -> None:
        """Takes the logits of the frontier's positions, in order, and sets the next frontier."""
        positions, self.frontier = self.frontier, []
        try:
            added = self._draw(positions, logits) if self._samples else self._rank(positions, logits)
        except InvalidRequest:  # the output ends there
            return
        self.frontier = self._next_frontier(added)

    def finish(self, method: str) -> Proposal:
        nodes, positions = self.nodes, self._kept()
        return Proposal(
            base_len=self.session.committed_len,
            token_ids=tuple(nodes[position].token_id for position in positions),
            method=method,
            parents=() if self.is_chain else tuple(self.parents_of(positions)),
            laws=tuple(law for position in positions if (law := nodes[position].law) is not None),
            confidence=_in_bytes([nodes[position].confidence for position in positions]),
        )

    def _rank(self, positions: Sequence[int], logits: Sequence[Row]) -> list[int]:
        spec, added = self.session.spec, []
        for position, row in zip(positions, logits, strict=True):
            output = self._output + self.path(position)
            for guess in ranked_guesses(spec, self.processor, row, output, self.max_branches):
                added.append(self._add(position, guess.token_id, guess.confidence, None))
        return added

    def _draw(self, positions: Sequence[int], logits: Sequence[Row]) -> list[int]:
        """Samples children at the positions, in the numbers that the tree's shape gives."""
        added = []
        for position, row in zip(positions, logits, strict=True):
            law = draft_law(self.processor, row, self._output + self.path(position))
            for rank, token_id in enumerate(draw_distinct(law, self._num_children(position), self._rng)):
                share = law.counts[law.token_ids.index(token_id)] / LAW_TOTAL
                added.append(self._add(position, token_id, share, law, rank))
        return added

    def _num_children(self, position: int) -> int:
        """Returns the number of sampled children; a chain is the shape with one branch."""
        shape = sampled_shape(self.max_nodes, self.max_depth, self.max_branches, self.beam_width)
        ranks: list[int] = []
        while position != ROOT:
            ranks.append(self.nodes[position].rank)
            position = self.nodes[position].parent
        return shape.get(tuple(reversed(ranks)), 0)

    def _add(self, position: int, token_id: int, confidence: float, law: SparseLaw | None, rank: int = 0) -> int:
        depth, joint = (0, 1.0) if position == ROOT else (self.nodes[position].depth, self.nodes[position].joint)
        self.nodes.append(Node(token_id, position, depth + 1, confidence, joint * confidence, law, rank))
        return len(self.nodes) - 1

    def _next_frontier(self, added: Sequence[int]) -> list[int]:
        if not added or self.nodes[added[0]].depth >= self.max_depth:
            return []
        if self.is_chain:
            return list(added) if len(self.nodes) < self.max_nodes else []
        if self._samples:
            return [position for position in added if self._num_children(position)]
        best = sorted(added, key=lambda position: (-self.nodes[position].joint, position))[: self.beam_width]
        if len(self.nodes) < self.max_nodes:
            return sorted(best)
        # A child's confidence never exceeds its parent's: below the worst node kept nothing is worth expanding.
        worst_kept = sorted((node.joint for node in self.nodes), reverse=True)[self.max_nodes - 1]
        return sorted(position for position in best if self.nodes[position].joint > worst_kept)

    def _kept(self) -> list[int]:
        """Returns the proposed nodes, parents first. The best nodes' ancestors are always among them."""
        if len(self.nodes) <= self.max_nodes:
            return list(range(len(self.nodes)))
        # Parents have smaller indices and are at least as confident, so a stable sort keeps them before their children.
        best = sorted(range(len(self.nodes)), key=lambda position: (-self.nodes[position].joint, position))
        return sorted(best[: self.max_nodes])


def _in_bytes(confidences: Sequence[float]) -> bytes:
    """Encodes confidences as bytes; empty if any was not computed."""
    if any(map(math.isnan, confidences)):
        return b""
    return bytes(min(255, int(confidence * 256)) for confidence in confidences)
