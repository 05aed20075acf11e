"""What suffix decoding must count and propose, found by looking at every piece of every text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


class PieceCounts:
    """A dictionary of all pieces of up to `max_depth` tokens: how often each occurs, and when it did last."""

    def __init__(self, texts: Sequence[Sequence[int]], max_depth: int) -> None:
        self.counts: Counter[Tokens] = Counter()
        self.last_seen: dict[Tokens, int] = {}
        clock = 0
        for text in texts:
            for end in range(1, len(text) + 1):
                clock += 1
                for start in range(max(0, end - max_depth), end):
                    self.counts[tuple(text[start:end])] += 1
                    self.last_seen[tuple(text[start:end])] = clock
        self.tokens = {token for text in texts for token in text}

    def followers(self, piece: Tokens) -> dict[int, int]:
        return {token: count for token in self.tokens if (count := self.counts[(*piece, token)])}


@dataclass(frozen=True)
class Chain:
    token_ids: Tokens = ()
    shares: tuple[float, ...] = ()
    score: float = 0.0


def chain_after(pieces: PieceCounts, piece: Tokens, max_len: int, min_path_prob: float) -> Chain:
    """The commonest next token, of several the one last seen, again and again."""
    token_ids: list[int] = []
    shares: list[float] = []
    score, path_prob = 0.0, 1.0
    while len(token_ids) < max_len:
        path = (*piece, *token_ids)
        followers = pieces.followers(path)
        if not followers:
            break
        best = max(followers, key=lambda token: (followers[token], pieces.last_seen[(*path, token)]))
        share = followers[best] / sum(followers.values())
        if path_prob * share < min_path_prob:
            break
        path_prob *= share
        score += path_prob
        token_ids.append(best)
        shares.append(share)
    return Chain(tuple(token_ids), tuple(shares), score)


def path_probs(pieces: PieceCounts, piece: Tokens, max_depth: int, min_path_prob: float) -> dict[Tokens, float]:
    """Every path after `piece` that is likely enough, with its probability."""
    found: dict[Tokens, float] = {}
    layer: dict[Tokens, float] = {(): 1.0}
    for _ in range(max_depth):
        below: dict[Tokens, float] = {}
        for path, path_prob in layer.items():
            followers = pieces.followers((*piece, *path))
            for token, count in followers.items():
                if path_prob * (count / sum(followers.values())) >= min_path_prob:
                    below[(*path, token)] = path_prob * (count / sum(followers.values()))
        found.update(below)
        layer = below
    return found
