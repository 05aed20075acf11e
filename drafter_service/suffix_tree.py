"""A suffix tree of bounded depth with counts: how often every short piece of some texts occurs, and what follows it.

Each place of a text starts a window of up to `max_depth` tokens, and the tree is the trie of all windows with
unbranched paths drawn together (McCreight 1976, cut off at a depth): at most two nodes per token of text, whatever the
depth. It is what suffix decoding guesses from (Oliaro et al. 2024, arXiv 2411.04975).

Nodes are numbers and their fields stand in arrays: a garbage collection then has nothing to visit, where a million
objects would hold up every session's draft. Released numbers are used again, so several trees that must not see each
other stand in one store, each under a root of its own, and the memory of all is bounded by their nodes.

Not here: which texts are kept (suffix_texts), what is proposed (suffix_draft). Not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

ROOT = 0
_NONE = -1
_EMPTY_TEXT = array("i")
# Shared by all leaves, never filled: half of all nodes are leaves, and a dictionary takes 64 bytes even when empty.
_CHILDLESS: Final[dict[int, int]] = {}


class Place(NamedTuple):
    """A string in the tree: the first `depth` tokens on the way from the root to `node`."""

    node: int
    depth: int


class Follower(NamedTuple):
    """A token that stood after a string, and its share of all tokens that did."""

    token_id: int
    share: float
    place: Place


class SuffixTree:
    """A window that ends does so at a node of its own; the number of windows along an edge is therefore constant.

    Texts are arrays that the tree refers to: they may grow, but must not change or shrink while they are in it.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        # The string of a node is texts[node][ends[node] - depths[node] : ends[node]].
        self._texts: list[array[int]] = []
        self._ends = array("q")
        self._depths = array("i")
        self._parents = array("i")
        # Windows that pass through the node or end there, and those of them that go on below it.
        self._counts = array("q")
        self._followed = array("q")
        # The commonest child, of several the one last seen; _NONE where it must be looked for.
        self._best = array("i")
        self._fields = (self._ends, self._depths, self._parents, self._counts, self._followed, self._best)
        self._children: list[dict[int, int]] = []
        self._free: list[int] = []
        self.add_root()

    @property
    def num_nodes(self) -> int:
        """All roots included."""
        return len(self._ends) - len(self._free)

    # ---- roots ----

    def add_root(self) -> int:
        """A tree of its own: from one root no text of another can be reached. ROOT is there from the start."""
        return self._add_node(_EMPTY_TEXT, end=0, depth=0, parent=_NONE, count=0)

    def drop_root(self, root: int) -> bool:
        """Releases the root of an empty tree; False if there still are windows in it."""
        if self._followed[root]:
            return False
        self._release(root)
        return True

    # ---- growth ----

    def insert(self, text: array[int], start: int, root: int = ROOT) -> Place:
        """Enters the window that starts at `start`; returns where it ends. O(max_depth)."""
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
        return Place(node, depth)

    def extend(self, node: int, text: array[int], end: int) -> int:
        """Extends the window of `text` that ends before `end`, at `node`, by one token; returns where it ends now.

        O(1). The window must not be of full depth; a root begins a window.
        """
        if self._counts[node] == 1 and self._texts[node] is text and self._ends[node] == end:
            # No other window's node, so it has no children: its edge grows.
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
        """Takes out the window that starts at `start`; all windows of a text must go, before the text does.

        O(max_depth) and independent of how many children a node has.
        """
        length = min(len(text) - start, self.max_depth)
        node, depth = root, 0
        while depth < length:
            self._followed[node] -= 1
            child = self._children[node][text[start + depth]]
            if self._best[node] == child:
                self._best[node] = _NONE
            self._counts[child] -= 1
            if not self._counts[child]:  # a leaf: a node below would have as few windows and been merged with it
                del self._children[node][text[start + depth]]
                self._release(child)
                break
            node, depth = child, self._depths[child]
            if self._texts[node] is text:
                self._texts[node], self._ends[node] = text[start : start + depth], depth
        self._merge_if_needless(node)

    # ---- questions ----

    def find(self, token_ids: array[int], root: int = ROOT) -> Place | None:
        """Where a string stands, or None if it is in no text; `token_ids` at most max_depth long."""
        node, depth = root, 0
        while depth < len(token_ids):
            node = self._children[node].get(token_ids[depth], _NONE)
            if node == _NONE:
                return None
            wanted = min(self._depths[node], len(token_ids))
            if depth + self._num_agreed(node, depth, token_ids, 0, wanted) < wanted:
                return None
            depth = wanted
        return Place(node, depth)

    def best_follower(self, place: Place) -> Follower | None:
        """The commonest next token, of several the one last seen; None where nothing follows. O(1).

        After a removal the tie-break is unknown, and the first question about a node looks at all its children.
        """
        node, depth = place
        if depth < self._depths[node]:
            return self._only_follower(place)
        if not self._followed[node]:
            return None
        child = self._best[node]
        if child == _NONE:
            child = self._best[node] = max(self._children[node].values(), key=self._counts.__getitem__)
        return self._follower(node, child)

    def followers(self, place: Place, min_share: float) -> list[Follower]:
        """Every next token with at least this share, the commonest first.

        O(1) if the commonest leaves the others too little, else O(number of different next tokens).
        """
        best = self.best_follower(place)
        if best is None or best.share < min_share:
            return []
        node, total = place.node, self.num_followed(place)
        commonest = self._counts[best.place.node]
        if commonest == total or (total - commonest) / total < min_share:
            return [best]
        others = [
            self._follower(node, child)
            for child in self._children[node].values()
            if child != best.place.node and self._counts[child] / total >= min_share
        ]
        return [best, *sorted(others, key=lambda follower: -follower.share)]

    def num_followed(self, place: Place) -> int:
        """How many times the string stands in the texts with a token after it, in one window."""
        node, depth = place
        return self._counts[node] if depth < self._depths[node] else self._followed[node]

    def text_of(self, place: Place) -> array[int]:
        """A text that the string was taken from, or a copy of a part of one that has been removed."""
        return self._texts[place.node]

    def walk(self, root: int = ROOT) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """String, windows and followed windows of every node below a root, for checks and tools."""
        waiting = list(self._children[root].values())
        while waiting:
            node = waiting.pop()
            end = self._ends[node]
            yield tuple(self._texts[node][end - self._depths[node] : end]), self._counts[node], self._followed[node]
            waiting.extend(self._children[node].values())

    # ---- parts ----

    def _only_follower(self, place: Place) -> Follower:
        node, depth = place
        return Follower(self._token(node, depth), 1.0, Place(node, depth + 1))

    def _follower(self, node: int, child: int) -> Follower:
        depth = self._depths[node]
        share = self._counts[child] / self._followed[node]
        return Follower(self._token(child, depth), share, Place(child, depth + 1))

    def _token(self, node: int, depth: int) -> int:
        """The token of the node's string at `depth`."""
        return self._texts[node][self._ends[node] - self._depths[node] + depth]

    def _num_agreed(self, node: int, depth: int, text: array[int], start: int, length: int) -> int:
        """How many tokens of the edge down to `node`, which begins at `depth`, the window goes along."""
        label_start = self._ends[node] - self._depths[node]
        num_tokens = min(self._depths[node], length) - depth
        label = self._texts[node][label_start + depth : label_start + depth + num_tokens]
        wanted = text[start + depth : start + depth + num_tokens]
        if label == wanted:
            return num_tokens
        return next(place for place in range(num_tokens) if label[place] != wanted[place])

    def _rank(self, node: int, child: int) -> None:
        """Notes the commonest child after one more window has gone from `node` to `child`."""
        best = self._best[node]
        if best != _NONE:
            if self._counts[child] >= self._counts[best]:
                self._best[node] = child
        elif len(self._children[node]) == 1:
            self._best[node] = child

    def _split(self, child: int, depth: int) -> int:
        """Puts a node into the edge down to `child`, where the string has `depth` tokens."""
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
        """Drops a node at which no window ends and the way does not branch."""
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
