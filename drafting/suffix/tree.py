"""A suffix tree of bounded depth with counts: how often each short string of some texts occurs, and what follows it.

Each position of a text starts a window of up to `max_depth` tokens. The tree is the trie of all windows with unbranched
paths merged (McCreight 1976, cut off at a depth): at most two nodes per token of text, for any depth. Suffix decoding
proposes from it (Oliaro et al. 2024, arXiv 2411.04975).

Nodes are numbers with their fields in arrays, so garbage collection has nothing to visit, where a million objects would
delay every session's draft. Freed numbers are reused. Several isolated trees share one store, each under its own root,
so that one limit on nodes bounds the memory of all.

Not here: which texts are stored (texts.py), what is proposed (draft.py). Not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

ROOT = 0
_NONE = -1
_EMPTY_TEXT = array("i")
# Shared by all leaves, always empty: half of all nodes are leaves, and an empty dictionary takes 64 bytes.
_CHILDLESS: Final[dict[int, int]] = {}


class Position(NamedTuple):
    """A string in the tree: the first `depth` tokens on the path from the root to `node`."""

    node: int
    depth: int


class Follower(NamedTuple):
    """A token that followed a string, and its share of all tokens that did."""

    token_id: int
    share: float
    position: Position


class SuffixTree:
    """A suffix tree with counts. Every window ends at a node, so the number of windows along an edge is constant.

    The tree refers to the arrays of its texts: they may grow, but must not change or shrink.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        # The string of a node is texts[node][ends[node] - depths[node] : ends[node]].
        self._texts: list[array[int]] = []
        self._ends = array("q")
        self._depths = array("i")
        self._parents = array("i")
        # Numbers of windows that pass through the node or end there, and of those that continue below it.
        self._counts = array("q")
        self._followed = array("q")
        # The commonest child, ties going to the most recent; _NONE where it must be searched.
        self._best = array("i")
        self._fields = (self._ends, self._depths, self._parents, self._counts, self._followed, self._best)
        self._children: list[dict[int, int]] = []
        self._free: list[int] = []
        self.add_root()

    @property
    def num_nodes(self) -> int:
        """Counts the nodes, all roots included."""
        return len(self._ends) - len(self._free)

    # ---- roots ----

    def add_root(self) -> int:
        """Adds an isolated tree: no text of another root is reachable from it. ROOT always exists."""
        return self._add_node(_EMPTY_TEXT, end=0, depth=0, parent=_NONE, count=0)

    def drop_root(self, root: int) -> bool:
        """Releases the root of an empty tree; False if it still has windows."""
        if self._followed[root]:
            return False
        self._release(root)
        return True

    # ---- growth ----

    def insert(self, text: array[int], start: int, root: int = ROOT) -> Position:
        """Adds the window that starts at `start`; returns the position of its end. O(max_depth)."""
        length = min(len(text) - start, self.max_depth)
        node, depth = root, 0
        while depth < length:
            self._followed[node] += 1
            children = self._children_to_fill(node)
            child = children.get(text[start + depth], _NONE)
            if child == _NONE:
                child = self._add_node(text, end=start + length, depth=length, parent=node, count=1)
                children[text[start + depth]] = child
            else:
                agreed = depth + self._num_agreed(child, depth, text, start, length)
                if agreed < self._depths[child]:
                    child = self._split(child, agreed)
                self._counts[child] += 1
            self._rank(node, child)
            node, depth = child, self._depths[child]
        return Position(node, depth)

    def extend(self, node: int, text: array[int], end: int) -> int:
        """Extends by one token the window of `text` that ends before `end`, at `node`; returns its new end node.

        O(1). The window must not have full depth; a root begins a window.
        """
        if self._counts[node] == 1 and self._texts[node] is text and self._ends[node] == end:
            # The node belongs to no other window and has no children: its edge grows.
            self._ends[node] += 1
            self._depths[node] += 1
            return node
        token_id, depth = text[end], self._depths[node] + 1
        self._followed[node] += 1
        children = self._children_to_fill(node)
        child = children.get(token_id, _NONE)
        if child == _NONE:
            child = children[token_id] = self._add_node(text, end=end + 1, depth=depth, parent=node, count=1)
        else:
            if self._depths[child] > depth:
                child = self._split(child, depth)
            self._counts[child] += 1
        self._rank(node, child)
        self._merge_if_needless(node)
        return child

    def remove(self, text: array[int], start: int, root: int = ROOT) -> None:
        """Removes the window that starts at `start`; remove all of a text's windows before the text.

        O(max_depth), for any number of children.
        """
        length = min(len(text) - start, self.max_depth)
        node, depth = root, 0
        while depth < length:
            self._followed[node] -= 1
            child = self._children[node][text[start + depth]]
            if self._best[node] == child:
                self._best[node] = _NONE
            self._counts[child] -= 1
            if not self._counts[child]:  # a leaf: a node below with equally few windows would have been merged
                del self._children[node][text[start + depth]]
                self._release(child)
                break
            node, depth = child, self._depths[child]
            if self._texts[node] is text:
                self._texts[node], self._ends[node] = text[start : start + depth], depth
        self._merge_if_needless(node)

    # ---- queries ----

    def find(self, token_ids: array[int], root: int = ROOT) -> Position | None:
        """Returns the position of a string, or None; `token_ids` has at most max_depth tokens."""
        node, depth = root, 0
        while depth < len(token_ids):
            node = self._children[node].get(token_ids[depth], _NONE)
            if node == _NONE:
                return None
            wanted = min(self._depths[node], len(token_ids))
            if depth + self._num_agreed(node, depth, token_ids, 0, wanted) < wanted:
                return None
            depth = wanted
        return Position(node, depth)

    def best_follower(self, position: Position) -> Follower | None:
        """Returns the commonest next token, ties going to the most recent; None where nothing follows. O(1).

        After a removal ties are arbitrary, and the first query of a node looks at all its children.
        """
        node, depth = position
        if depth < self._depths[node]:
            return self._only_follower(position)
        if not self._followed[node]:
            return None
        child = self._best[node]
        if child == _NONE:
            child = self._best[node] = max(self._children[node].values(), key=self._counts.__getitem__)
        return self._follower(node, child)

    def followers(self, position: Position, min_share: float) -> list[Follower]:
        """Returns every next token with at least this share, the commonest first.

        O(1) if the commonest leaves the others too little, else O(number of different next tokens).
        """
        best = self.best_follower(position)
        if best is None or best.share < min_share:
            return []
        node, total = position.node, self.num_followed(position)
        commonest = self._counts[best.position.node]
        if commonest == total or (total - commonest) / total < min_share:
            return [best]
        others = [
            self._follower(node, child)
            for child in self._children[node].values()
            if child != best.position.node and self._counts[child] / total >= min_share
        ]
        return [best, *sorted(others, key=lambda follower: -follower.share)]

    def num_followed(self, position: Position) -> int:
        """Counts the string's occurrences in the texts with a token after it, within one window."""
        node, depth = position
        return self._counts[node] if depth < self._depths[node] else self._followed[node]

    def text_of(self, position: Position) -> array[int]:
        """Returns a text with the string, or a copy of part of a removed one."""
        return self._texts[position.node]

    def walk(self, root: int = ROOT) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yields string, windows and continued windows of every node below a root, for checks and tools."""
        waiting = list(self._children[root].values())
        while waiting:
            node = waiting.pop()
            end = self._ends[node]
            yield tuple(self._texts[node][end - self._depths[node] : end]), self._counts[node], self._followed[node]
            waiting.extend(self._children[node].values())

    # ---- parts ----

    def _only_follower(self, position: Position) -> Follower:
        node, depth = position
        return Follower(self._token(node, depth), 1.0, Position(node, depth + 1))

    def _follower(self, node: int, child: int) -> Follower:
        depth = self._depths[node]
        share = self._counts[child] / self._followed[node]
        return Follower(self._token(child, depth), share, Position(child, depth + 1))

    def _token(self, node: int, depth: int) -> int:
        """Returns the token of the node's string at `depth`."""
        return self._texts[node][self._ends[node] - self._depths[node] + depth]

    def _num_agreed(self, node: int, depth: int, text: array[int], start: int, length: int) -> int:
        """Counts the leading tokens of the edge to `node`, which begins at `depth`, that match the window."""
        label_start = self._ends[node] - self._depths[node]
        num_tokens = min(self._depths[node], length) - depth
        label = self._texts[node][label_start + depth : label_start + depth + num_tokens]
        wanted = text[start + depth : start + depth + num_tokens]
        if label == wanted:
            return num_tokens
        return next(position for position in range(num_tokens) if label[position] != wanted[position])

    def _rank(self, node: int, child: int) -> None:
        """Updates the commonest child after one more window went from `node` to `child`."""
        best = self._best[node]
        if best != _NONE:
            if self._counts[child] >= self._counts[best]:
                self._best[node] = child
        elif len(self._children[node]) == 1:
            self._best[node] = child

    def _split(self, child: int, depth: int) -> int:
        """Inserts a node into the edge to `child`, where the string has `depth` tokens."""
        parent = self._parents[child]
        above = self._add_node(
            self._texts[child],
            end=self._ends[child] - self._depths[child] + depth,
            depth=depth,
            parent=parent,
            count=self._counts[child],
        )
        self._followed[above] = self._counts[child]
        self._children_to_fill(above)[self._token(child, depth)] = child
        self._best[above] = child
        self._replace_child(parent, child, above)
        self._parents[child] = above
        return above

    def _merge_if_needless(self, node: int) -> None:
        """Merges a node at which no window ends and the path does not branch."""
        children = self._children[node]
        if not self._depths[node] or len(children) != 1 or self._followed[node] < self._counts[node]:
            return
        (child,) = children.values()
        parent = self._parents[node]
        self._replace_child(parent, node, child)
        self._parents[child] = parent
        self._release(node)

    def _replace_child(self, parent: int, old: int, new: int) -> None:
        self._children[parent][self._token(old, self._depths[parent])] = new
        if self._best[parent] == old:
            self._best[parent] = new

    def _children_to_fill(self, node: int) -> dict[int, int]:
        children = self._children[node]
        if children is _CHILDLESS:
            children = self._children[node] = {}
        return children

    def _add_node(self, text: array[int], *, end: int, depth: int, parent: int, count: int) -> int:
        values = (end, depth, parent, count, 0, _NONE)
        if self._free:
            node = self._free.pop()
            self._texts[node] = text
            for column, value in zip(self._fields, values, strict=True):
                column[node] = value
            return node
        self._texts.append(text)
        self._children.append(_CHILDLESS)
        for column, value in zip(self._fields, values, strict=True):
            column.append(value)
        return len(self._ends) - 1

    def _release(self, node: int) -> None:
        self._texts[node], self._children[node] = _EMPTY_TEXT, _CHILDLESS
        self._free.append(node)
