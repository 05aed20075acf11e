"""The texts that suffix decoding searches: a growing one, and those of ended sessions.

Not here: counting (tree.py) and proposing (draft.py).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from outrider.drafting.suffix.tree import ROOT, Position, SuffixTree

# tokens; longest extension that is done token by token; for longer ones, completing each open window at once is cheaper
_BULK = 8


def suffixes_in(tree: SuffixTree, root: int, token_ids: array[int]) -> list[Position]:
    """Returns the positions of the last tokens below `root`, the longest suffix found first."""
    positions: list[Position] = []
    for length in range(1, min(tree.max_depth - 1, len(token_ids)) + 1):
        position = tree.find(token_ids[-length:], root)
        if position is None:  # then no longer suffix occurs either
            break
        positions.append(position)
    return positions[::-1]


class LiveText:
    """A growing text with its own tree. Its latest windows are open: they grow with it."""

    def __init__(self, max_depth: int) -> None:
        self.token_ids = array("i")
        self.tree = SuffixTree(max_depth)
        # Nodes at which the open windows end, the longest first; the last window has one token.
        self._open: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text; O(max_depth) per token."""
        if len(token_ids) > _BULK:
            self._extend_in_bulk(token_ids)
            return
        for token_id in token_ids:
            end = len(self.token_ids)
            self.token_ids.append(token_id)
            self._open = [self.tree.extend(node, self.token_ids, end) for node in (*self._open, ROOT)]
            if len(self._open) == self.tree.max_depth:
                del self._open[0]

    def suffixes(self) -> list[Position]:
        """Returns the positions of the text's last tokens, the longest suffix first: max_depth - 1 tokens down to 1."""
        return [Position(node, len(self._open) - index) for index, node in enumerate(self._open)]

    def suffixes_with(self, tail: Sequence[int]) -> list[Position]:
        """Returns the positions of the last tokens of the text plus `tail`, as far as they occur in the text.

        O(max_depth squared).
        """
        last = self.token_ids[max(0, len(self.token_ids) - self.tree.max_depth) :]
        last.extend(tail)
        return suffixes_in(self.tree, ROOT, last)

    def _extend_in_bulk(self, token_ids: Sequence[int]) -> None:
        known = len(self.token_ids)
        self.token_ids.extend(token_ids)
        length, max_depth = len(self.token_ids), self.tree.max_depth
        ends: list[int] = []
        for index, node in enumerate(self._open):
            start = known - len(self._open) + index
            for end in range(known, min(length, start + max_depth)):
                node = self.tree.extend(node, self.token_ids, end)
            ends.append(node)
        ends.extend(self.tree.insert(self.token_ids, start).node for start in range(known, length))
        self._open = ends[-min(length, max_depth - 1) :] if max_depth > 1 else []


class PastTexts:
    """Holds outputs of ended sessions, with one tree per salt: without the salt, none of its texts are visible.

    Bounded by the number of texts and by the nodes of all trees; evicts the least recently used.
    """

    def __init__(self, max_depth: int, *, max_num_texts: int, max_num_nodes: int) -> None:
        self.tree = SuffixTree(max_depth)
        self._max_num_texts = max_num_texts
        self._max_num_nodes = max_num_nodes
        self._roots: dict[str, int] = {}
        # Maps (salt, session) -> text, the least recently used first.
        self._texts: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._keys: dict[int, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def suffixes(self, cache_salt: str, token_ids: array[int]) -> list[Position]:
        """Returns the positions of a text's last tokens in this salt's texts, the longest suffix found first."""
        root = self._roots.get(cache_salt)
        return [] if root is None else suffixes_in(self.tree, root, token_ids)

    def add(self, cache_salt: str, session_id: str, token_ids: Sequence[int]) -> None:
        """Adds an output, or its end if it is too long; replaces the session's earlier output.

        A text needs at most two nodes per token and one for its salt's root, so the limit is never exceeded.
        """
        self._remove((cache_salt, session_id))
        num_roots = 2  # the tree's own, which stays empty, and the salt's
        token_ids = token_ids[max(0, len(token_ids) - (self._max_num_nodes - num_roots) // 2) :]
        if len(token_ids) < 2 or not self._max_num_texts:  # no token follows another
            return
        while self._texts and (
            len(self._texts) >= self._max_num_texts
            or self.tree.num_nodes + 2 * len(token_ids) + 1 > self._max_num_nodes
        ):
            self._remove(next(iter(self._texts)))
        if cache_salt not in self._roots:
            self._roots[cache_salt] = self.tree.add_root()
        text = array("i", token_ids)
        for start in range(len(text)):
            self.tree.insert(text, start, self._roots[cache_salt])
        self._texts[cache_salt, session_id] = text
        self._keys[id(text)] = (cache_salt, session_id)

    def touch(self, text: array[int]) -> None:
        """Marks a text as used; ignores a text that has been removed."""
        key = self._keys.get(id(text))
        if key is not None:
            self._texts.move_to_end(key)

    def _remove(self, key: tuple[str, str]) -> None:
        text = self._texts.pop(key, None)
        if text is None:
            return
        del self._keys[id(text)]
        root = self._roots[key[0]]
        for start in range(len(text)):
            self.tree.remove(text, start, root)
        if self.tree.drop_root(root):
            del self._roots[key[0]]
