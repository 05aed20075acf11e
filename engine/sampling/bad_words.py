"""Finds the tokens that would complete a bad word, from the last output tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# requests; number whose tries are cached for their other outputs; at most 5 MB each (MAX_BAD_WORDS_TOKENS)
_NUM_TRIES = 8


@dataclass(slots=True)
class _Node:
    """A node of the trie. `before`: the nodes of tokens that precede this one. `ids`: tokens that end a word here."""

    before: dict[int, _Node] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)


class BadWords:
    """A trie of all words without their last token, read backwards.

    A row's cost is the length of the longest match, at most MAX_BAD_WORD_TOKENS (shared/sampling_params.py), whatever
    the number of words.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        for word in words:
            node = self._root
            for token_id in reversed(word[:-1]):
                node = node.before.setdefault(token_id, _Node())
            node.ids.append(word[-1])

    def __bool__(self) -> bool:
        return bool(self._root.ids or self._root.before)

    def completing(self, output_token_ids: Sequence[int]) -> Iterator[NDArray[np.int64]]:
        """Yields int64 arrays of the tokens that would complete a word after this output."""
        node: _Node | None = self._root
        place = len(output_token_ids)
        while node is not None:
            if node.ids:
                yield np.asarray(node.ids, dtype=np.int64)
            place -= 1
            node = node.before.get(output_token_ids[place]) if place >= 0 else None


@lru_cache(maxsize=_NUM_TRIES)
def bad_words_trie(words: tuple[tuple[int, ...], ...]) -> BadWords:
    """Returns the trie, read-only, that all sessions with these words share: 1,024 words take 5 ms to build."""
    return BadWords(words)
