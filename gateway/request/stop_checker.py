"""Finds stop strings in text that arrives in pieces, and holds back a possible beginning of one.

An Aho-Corasick automaton: the state is the longest suffix of the text that begins some stop string, so its depth is the
length to hold back, and a character costs O(1) for any number of stop strings. The first match to end wins; of those
that end together, the longest. So the result does not depend on how the text is split.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Checked:
    """The result of a push. text: may be shown now. stop: the stop string that was found, which ends the output."""

    text: str
    stop: str | None = None


class StopChecker:
    """Finds stop strings in an output's text. Pass the text to `push` until one is found."""

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        self._include_stop = include_stop
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._match: list[str | None] = [None]
        for text in stop:
            self._insert(text)
        self._link()
        self._state = 0
        self._held = ""

    def _insert(self, text: str) -> None:
        node = 0
        for character in text:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._match.append(None)
            node = child
        self._match[node] = text

    def _link(self) -> None:
        """Links nodes breadth-first: a node's fallback is its longest proper suffix that is also a node."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                self._fallback[child] = self._step(self._fallback[node], character)
                queue.append(child)
            if self._match[node] is None:
                self._match[node] = self._match[self._fallback[node]]

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)

    def push(self, text: str) -> Checked:
        """Returns the text that may be shown after adding `text`."""
        state = self._state
        for position, character in enumerate(text):
            state = self._step(state, character)
            match = self._match[state]
            if match is not None:
                return self._found(self._held + text[: position + 1], match)
        self._state = state
        pending = self._held + text
        # If the output includes the stop string, its beginning may be shown early.
        cut = len(pending) if self._include_stop else len(pending) - self._depth[state]
        self._held = pending[cut:]
        return Checked(pending[:cut])

    def _found(self, pending: str, match: str) -> Checked:
        self._held = ""
        return Checked(pending if self._include_stop else pending[: len(pending) - len(match)], match)

    def flush(self) -> str:
        """Returns the text held back, when the output ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
