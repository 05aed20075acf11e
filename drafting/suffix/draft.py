"""A suffix tree's proposal after a string: the commonest path as a chain, or the likeliest nodes as a tree.

Both depend only on counts fixed before verification, so a proposal is a fixed tree of point masses (Oliaro et al. 2024,
section 4.2: greedy expansion, score = expected number of accepted tokens).
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from outrider.drafting.suffix.tree import Follower, Position, SuffixTree

_ROOT = -1
# ratio; slack for a quotient multiplied back, which may miss its origin; excess candidates are checked again
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class DraftLimits:
    """Limits of a draft.

    min_path_prob: minimum product of shares along a path. max_branches: children per node; 1: chain, 0: no limit.
    """

    max_nodes: int
    max_depth: int
    max_branches: int
    min_path_prob: float


@dataclass
class SuffixDraft:
    """A draft's tokens with parents first (-1: the committed prefix).

    shares: how often each token followed its parent. score: sum over the tokens of their path's product of shares, the
    expected number of accepted tokens. last_position: that of the last token. match_len: tokens of the text that it
    was found by.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    score: float = 0.0
    last_position: Position | None = None
    match_len: int = 0

    def add(self, parent: int, follower: Follower, path_prob: float) -> int:
        self.token_ids.append(follower.token_id)
        self.parents.append(parent)
        self.shares.append(follower.share)
        self.score += path_prob
        self.last_position = follower.position
        return len(self.token_ids) - 1

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))


def draft_from(tree: SuffixTree, position: Position, limits: DraftLimits) -> SuffixDraft:
    """Returns the draft after the string at `position`; empty where nothing followed it often enough."""
    return _chain(tree, position, limits) if limits.max_branches == 1 else _tree(tree, position, limits)


def _chain(tree: SuffixTree, position: Position, limits: DraftLimits) -> SuffixDraft:
    draft, path_prob = SuffixDraft(), 1.0
    for index in range(min(limits.max_nodes, limits.max_depth)):
        follower = tree.best_follower(position)
        if follower is None or path_prob * follower.share < limits.min_path_prob:
            break
        path_prob *= follower.share
        draft.add(index - 1, follower, path_prob)
        position = follower.position
    return draft


def _tree(tree: SuffixTree, position: Position, limits: DraftLimits) -> SuffixDraft:
    """Adds the likeliest child of a chosen node repeatedly: no other tree has a higher score."""
    draft, order = SuffixDraft(), itertools.count()
    waiting: list[tuple[float, int, int, int, Follower]] = []

    def open_up(parent: int, position: Position, depth: int, path_prob: float) -> None:
        if depth > limits.max_depth:
            return
        followers = tree.followers(position, limits.min_path_prob / path_prob * _ROUNDING)
        for follower in followers[: limits.max_branches or None]:
            if path_prob * follower.share >= limits.min_path_prob:
                heapq.heappush(waiting, (-path_prob * follower.share, next(order), parent, depth, follower))

    open_up(_ROOT, position, 1, 1.0)
    while waiting and len(draft.token_ids) < limits.max_nodes:
        negated_prob, _order, parent, depth, follower = heapq.heappop(waiting)
        index = draft.add(parent, follower, -negated_prob)
        open_up(index, follower.position, depth + 1, -negated_prob)
    return draft
