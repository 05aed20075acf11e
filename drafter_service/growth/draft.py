"""One session's proposal while it grows.

A chain takes one token at a time. A tree grows as in EAGLE-2 (Li et al. 2024): at each depth the few places with the
best joint confidence are looked at, and at the end the best nodes of all are kept. In rejection mode a node that has
been drawn must not be dropped for what was drawn, so there the shape is settled beforehand (sampled_tree).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from drafter_service.growth.choice import draft_law, ranked_guesses, samples
from drafter_service.growth.laws import draw_distinct, propose_rng
from drafter_service.growth.sampled_tree import sampled_shape
from drafter_service.session import DraftSession
from engine.chains import ChainDraws, DrawnToken
from engine.coupling import index_key
from engine.sampling import LogitsProcessor, Row
from shared.errors import InvalidRequest
from shared.messages import LAW_TOTAL, Proposal, SparseLaw

T = TypeVar("T")
ROOT = -1
# Places looked at per depth, and children of each, when the step does not say.
BEAM_WIDTH = 6
MAX_BRANCHES = 4


@dataclass(frozen=True)
class Node:
    """A guessed token. `joint` is the product of the confidences down to it; `rank` its place among its siblings."""

    token_id: int
    parent: int
    depth: int
    confidence: float
    joint: float
    law: SparseLaw | None
    rank: int = 0


@dataclass
class Draft:
    """`frontier` are the places (ROOT, or indices of `nodes`) whose logits are wanted next; empty when it is done."""

    session: DraftSession
    processor: LogitsProcessor
    max_nodes: int
    max_depth: int
    max_branches: int = 1
    nodes: list[Node] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])

    def __post_init__(self) -> None:
        spec = self.session.spec
        self._rng = propose_rng(spec.stream_key, spec.epoch, self.session.committed_len)
        self._output = self.session.output_token_ids
        self._samples = samples(spec)
        if min(self.max_nodes, self.max_depth) <= 0:
            self.stop()

    @property
    def is_chain(self) -> bool:
        return self.max_branches == 1

    @property
    def depth(self) -> int:
        """Tokens between the committed ones and what the frontier will be followed by."""
        return 0 if not self.frontier or self.frontier[0] == ROOT else self.nodes[self.frontier[0]].depth

    @property
    def max_rows(self) -> int:
        """The most rows that `rows` ever holds."""
        return self.max_nodes if self.is_chain else BEAM_WIDTH * self.max_depth

    @property
    def is_plain_chain(self) -> bool:
        """Whether its tokens are drawn from laws, or win their races, or are argmaxes, that no token before edits."""
        return self.is_chain and self.processor.is_plain

    def chain_draws(self) -> ChainDraws:
        """How the tokens of a plain chain are drawn, as many as it may have. What `grow` would read of the proposal's
        randomness is read here: to be asked for once."""
        spec, num_tokens, first = self.session.spec, min(self.max_nodes, self.max_depth), len(self._output)
        keys = [index_key(spec.stream_key, first + depth) for depth in range(num_tokens)]
        # One number a token, as `draw_distinct` reads them: the counts of a law sum to LAW_TOTAL.
        places = self._rng.integers(LAW_TOTAL, size=num_tokens) if self._samples else None
        return ChainDraws(spec.sampling_params, np.array(keys, dtype=np.uint32), places)

    def take_chain(self, chain: Sequence[DrawnToken]) -> None:
        """A whole chain that was drawn elsewhere, as `grow` would have drawn it."""
        place = ROOT
        for drawn in chain:
            place = self._add(place, drawn.token_id, drawn.share, drawn.law)
        self.stop()

    def rows(self) -> list[int]:
        """The frontier's nodes and all above them, parents first: what a net has to compute to look at the frontier."""
        wanted: set[int] = set()
        for place in self.frontier:
            while place != ROOT and place not in wanted:
                wanted.add(place)
                place = self.nodes[place].parent
        return sorted(wanted)

    def frontier_of(self, results: Sequence[T]) -> list[T]:
        """Of one result for each of `rows`, those of the frontier, in its order."""
        by_place = dict(zip(self.rows(), results, strict=True))
        return [by_place[place] for place in self.frontier]

    def parents_of(self, places: Sequence[int]) -> list[int]:
        """For nodes that `rows` gave: where the parent of each stands among them, ROOT for none."""
        index = {place: row for row, place in enumerate(places)} | {ROOT: ROOT}
        return [index[self.nodes[place].parent] for place in places]

    def stop(self) -> None:
        """No more tokens; what has grown is proposed."""
        self.frontier = []

    def path(self, place: int) -> list[int]:
        """Token ids from the root down to a place."""
        tokens: list[int] = []
        while place != ROOT:
            tokens.append(self.nodes[place].token_id)
            place = self.nodes[place].parent
        return tokens[::-1]

    def grow(self, logits: Sequence[Row]) -> None:
        """Takes the logits of the frontier's places, in order, and sets the next frontier."""
        places, self.frontier = self.frontier, []
        try:
            added = self._draw(places, logits) if self._samples else self._rank(places, logits)
        except InvalidRequest:  # no token is allowed there: the target will say so to its own session
            return
        self.frontier = self._next_frontier(added)

    def finish(self, method: str) -> Proposal:
        nodes, places = self.nodes, self._kept()
        return Proposal(
            base_len=self.session.committed_len,
            token_ids=tuple(nodes[place].token_id for place in places),
            method=method,
            parents=() if self.is_chain else tuple(self.parents_of(places)),
            laws=tuple(law for place in places if (law := nodes[place].law) is not None),
            confidence=_in_bytes([nodes[place].confidence for place in places]),
        )

    def _rank(self, places: Sequence[int], logits: Sequence[Row]) -> list[int]:
        spec, added = self.session.spec, []
        for place, row in zip(places, logits, strict=True):
            output = self._output + self.path(place)
            for guess in ranked_guesses(spec, self.processor, row, output, self.max_branches):
                added.append(self._add(place, guess.token_id, guess.confidence, None))
        return added

    def _draw(self, places: Sequence[int], logits: Sequence[Row]) -> list[int]:
        """Children drawn from the places' laws, as many as the shape has there."""
        added = []
        for place, row in zip(places, logits, strict=True):
            law = draft_law(self.processor, row, self._output + self.path(place))
            for rank, token_id in enumerate(draw_distinct(law, self._num_children(place), self._rng)):
                share = law.counts[law.token_ids.index(token_id)] / LAW_TOTAL
                added.append(self._add(place, token_id, share, law, rank))
        return added

    def _num_children(self, place: int) -> int:
        """Of a place whose children are drawn; a chain is the shape with one branch."""
        shape = sampled_shape(self.max_nodes, self.max_depth, self.max_branches, BEAM_WIDTH)
        ranks: list[int] = []
        while place != ROOT:
            ranks.append(self.nodes[place].rank)
            place = self.nodes[place].parent
        return shape.get(tuple(reversed(ranks)), 0)

    def _add(self, place: int, token_id: int, confidence: float, law: SparseLaw | None, rank: int = 0) -> int:
        depth, joint = (0, 1.0) if place == ROOT else (self.nodes[place].depth, self.nodes[place].joint)
        self.nodes.append(Node(token_id, place, depth + 1, confidence, joint * confidence, law, rank))
        return len(self.nodes) - 1

    def _next_frontier(self, added: Sequence[int]) -> list[int]:
        if not added or self.nodes[added[0]].depth >= self.max_depth:
            return []
        if self.is_chain:
            return list(added) if len(self.nodes) < self.max_nodes else []
        if self._samples:
            return [place for place in added if self._num_children(place)]
        best = sorted(added, key=lambda place: (-self.nodes[place].joint, place))[:BEAM_WIDTH]
        if len(self.nodes) < self.max_nodes:
            return sorted(best)
        # A child is never surer than its parent: below the worst node that would be kept nothing is worth a look.
        worst_kept = sorted((node.joint for node in self.nodes), reverse=True)[self.max_nodes - 1]
        return sorted(place for place in best if self.nodes[place].joint > worst_kept)

    def _kept(self) -> list[int]:
        """The nodes that are proposed, parents first. The best of all stand above their descendants by themselves."""
        if len(self.nodes) <= self.max_nodes:
            return list(range(len(self.nodes)))
        # Parents have smaller places and are at least as sure, so a stable sort takes them before their children.
        best = sorted(range(len(self.nodes)), key=lambda place: (-self.nodes[place].joint, place))
        return sorted(best[: self.max_nodes])


def _in_bytes(confidences: Sequence[float]) -> bytes:
    """Nothing where one of them was not worked out."""
    if any(map(math.isnan, confidences)):
        return b""
    return bytes(min(255, int(confidence * 256)) for confidence in confidences)
