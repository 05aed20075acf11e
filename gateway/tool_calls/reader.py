"""Text that arrives in pieces, read by coroutines that never see where a piece ends.

A coroutine asks for characters with `yield from` and waits while there are none. So what it does depends on the
characters alone, never on how they were cut.
"""

from __future__ import annotations

from collections.abc import Container, Generator
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]


class Reader:
    """`feed` and `end` are the writer's side; all else is for the one coroutine that reads."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        self.ended = True

    def _available(self, count: int) -> Step[bool]:
        """Waits until `count` characters follow; False if the text ends before."""
        while len(self._text) - self._at < count:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Step[str]:
        """The next character, which is left there; "" at the end."""
        return self._text[self._at] if (yield from self._available(1)) else ""

    def take(self) -> Step[str]:
        character = yield from self.peek()
        self._at += len(character)
        return character

    def match(self, marker: str) -> Step[bool]:
        """Takes `marker` if it follows. Decides at the first character that differs."""
        for place, character in enumerate(marker):
            if not (yield from self._available(place + 1)) or self._text[self._at + place] != character:
                return False
        self._at += len(marker)
        return True

    def follows(self, marker: str) -> Step[bool]:
        """As `match`, but takes nothing."""
        found = yield from self.match(marker)
        self._at -= len(marker) if found else 0
        return found

    def run(self, stops: Container[str]) -> Step[str]:
        """The characters before the next of `stops` that have arrived; none only if a stop or the end follows."""
        if not (yield from self._available(1)):
            return ""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in stops:
            self._at += 1
        return self._text[start : self._at]

    def skip_space(self) -> Step[str]:
        """Takes whitespace and returns it."""
        taken = ""
        while (character := (yield from self.peek())) and character.isspace():
            taken += character
            self._at += 1
        return taken

    # ---- going back ----

    def unread(self, text: str) -> None:
        """Puts text that was taken in front of what follows. Not while there is a mark."""
        self._text, self._at = text + self._text[self._at :], 0

    def mark(self) -> None:
        """Keeps the text from here on, for `rewind`. One mark at a time."""
        self._mark = self._at

    def since_mark(self) -> int:
        """Characters taken since the mark; 0 without one."""
        return 0 if self._mark is None else self._at - self._mark

    def rewind(self) -> None:
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def forget(self) -> None:
        """Drops the mark: what was taken since stays taken."""
        self._mark = None
