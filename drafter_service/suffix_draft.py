"""What a suffix tree proposes after a string: the commonest way down as a chain, or the likeliest nodes as a tree.

Both are settled by the counts alone, before anything is verified, so a proposal is a fixed tree of point masses
(Oliaro et al. 2024, section 4.2: greedy expansion, score = expected number of accepted tokens).
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from drafter_service.suffix_tree import Follower, Place, SuffixTree

_ROOT = -1
# A quotient multiplied back may miss the number it came from; what it lets through too many is looked at again.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class DraftLimits:
    """`min_path_prob`: least product of shares down to a token. `max_branches`: children of one node; 1: a chain,
    0: no limit.
    """

    max_nodes: int
    max_depth: int
    max_branches: int
    min_path_prob: float


@dataclass
class SuffixDraft:
    """Tokens with parents first (-1: the committed prefix); `shares` are how often each followed its parent.

    `score` is the sum over the tokens of the product of shares down to them: what is expected to be accepted if the
    shares are right. `last_place` is where the last token stands.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    score: float = 0.0
    last_place: Place | None = None

    def add(self, parent: int, follower: Follower, path_prob: float) -> int:
        self.token_ids.append(follower.token_id)
        self.parents.append(parent)
        self.shares.append(follower.share)
        self.score += path_prob
        self.last_place = follower.place
        return len(self.token_ids) - 1

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))


def draft_from(tree: SuffixTree, place: Place, limits: DraftLimits) -> SuffixDraft:
    """The draft after the string at `place`; empty where nothing followed it often enough."""
    return _chain(tree, place, limits) if limits.max_branches == 1 else _tree(tree, place, limits)


def _chain(tree: SuffixTree, place: Place, limits: DraftLimits) -> SuffixDraft:
    draft, path_prob = SuffixDraft(), 1.0
    for index in range(min(limits.max_nodes, limits.max_depth)):
        follower = tree.best_follower(place)
        if follower is None or path_prob * follower.share < limits.min_path_prob:
            break
        path_prob *= follower.share
        draft.add(index - 1, follower, path_prob)
        place = follower.place
    return draft


def _tree(tree: SuffixTree, place: Place, limits: DraftLimits) -> SuffixDraft:
    """The likeliest node of all that hang below a chosen one, again and again: no other tree has a higher score."""
    draft, order = SuffixDraft(), itertools.count()
    waiting: list[tuple[float, int, int, int, Follower]] = []

    def open_up(parent: int, place: Place, depth: int, path_prob: float) -> None:
        if depth > limits.max_depth:
            return
        followers = tree.followers(place, limits.min_path_prob / path_prob * _ROUNDING)
        for follower in followers[: limits.max_branches or None]:
            if path_prob * follower.share >= limits.min_path_prob:
                heapq.heappush(waiting, (-path_prob * follower.share, next(order), parent, depth, follower))

    open_up(_ROOT, place, 1, 1.0)
    while waiting and len(draft.token_ids) < limits.max_nodes:
        negated_prob, _order, parent, depth, follower = heapq.heappop(waiting)
        index = draft.add(parent, follower, -negated_prob)
        open_up(index, follower.place, depth + 1, -negated_prob)
    return draft
