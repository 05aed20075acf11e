"""Text that arrives in pieces, read by coroutines that never see where a piece ends.

A coroutine asks for characters with `yield from` and waits while there are none. So what it does depends on the
characters alone, never on how they were cut.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
# characters; consumed text left in the buffer; dropping it copies the rest, which is too slow to do for each piece
_SPENT_CHARS = 4096


class Reader:
    """Text that comes in pieces. `feed` and `end` are the writer's side; all else is for the one reading coroutine."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        # Where the readable text ends: at the end of what has come, or at the limit, behind which no more may be held.
        self._end = 0
        self._limit = sys.maxsize
        self._num_dropped = 0
        self._mark: int | None = None
        self.has_ended = False
        self.was_cut = False

    def feed(self, text: str) -> None:
        keep = self._at if self._mark is None else self._mark
        whole, self._text = self._text, ""  # the only reference to it: Python appends in place
        if keep > _SPENT_CHARS:
            whole = whole[keep:]
            self._at -= keep
            self._limit -= keep
            self._num_dropped += keep
            self._mark = None if self._mark is None else 0
        whole += text
        self._text = whole
        self._end = min(len(whole), self._limit)

    def end(self, *, was_cut: bool = False) -> None:
        """Ends the text. was_cut: the writer would have written more."""
        self.has_ended, self.was_cut = True, was_cut

    @property
    def ended(self) -> bool:
        """True if no character follows, nor ever will."""
        return self.has_ended and self._at >= len(self._text)

    @property
    def ended_by_cut(self) -> bool:
        return self.was_cut and self.ended

    @property
    def position(self) -> int:
        """Characters taken so far."""
        return self._num_dropped + self._at

    def peek(self) -> Step[str]:
        """Returns the next character, without taking it; "" at the end."""
        while self._at >= self._end:
            if self.has_ended or self._end < len(self._text):
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Step[str]:
        character = yield from self.peek()
        self._at += len(character)
        return character

    def match(self, marker: str) -> Step[bool]:
        """Takes `marker` if it follows. Decides at the first character that differs."""
        while not self._text.startswith(marker, self._at, self._end):
            if self._end - self._at >= len(marker) or not marker.startswith(self._text[self._at : self._end]):
                return False
            if self.has_ended or self._end < len(self._text):
                return False
            yield
        self._at += len(marker)
        return True

    def follows(self, marker: str) -> Step[bool]:
        """Like `match`, but takes nothing."""
        return self.any_follows((marker,))

    def any_follows(self, markers: Iterable[str]) -> Step[bool]:
        for marker in markers:
            if (yield from self.match(marker)):
                self._at -= len(marker)
                return True
        return False

    def run(self, characters: re.Pattern[str]) -> Step[str]:
        """Takes those that have arrived; none only if another one or the end follows."""
        while self._at >= self._end:
            if self.has_ended or self._end < len(self._text):
                return ""
            yield
        found = characters.match(self._text, self._at, self._end)
        run = found[0] if found is not None else ""
        self._at += len(run)
        return run

    def skip_space(self) -> Step[str]:
        """Takes whitespace and returns it."""
        if self._at < self._end and not self._text[self._at].isspace():
            return ""
        taken = []
        while space := (yield from self.run(_SPACE)):
            taken.append(space)
        return "".join(taken)

    # ---- going back ----

    def unread(self, text: str) -> None:
        """Puts text that was taken in front of what follows. Not while there is a mark."""
        self._num_dropped += self._at - len(text)
        self._text, self._at = text + self._text[self._at :], 0
        self._end = len(self._text)

    def mark(self, most_held: int | None = None) -> None:
        """Keeps the text from here on, for `rewind`: the text seems to end behind `most_held` characters, if given. One
        mark at a time.
        """
        self._mark = self._at
        self._hold(sys.maxsize if most_held is None else self._at + most_held)

    def _hold(self, limit: int) -> None:
        self._limit = limit
        self._end = min(len(self._text), limit)

    def hold_all(self) -> None:
        self._hold(sys.maxsize)

    def rewind(self) -> None:
        if self._mark is not None:
            self._at = self._mark
        self.forget()

    def forget(self) -> None:
        """Drops the mark: what was taken since stays taken."""
        self._mark = None
        self.hold_all()


@lru_cache(maxsize=256)
def outside(stops: str) -> re.Pattern[str]:
    """Returns a regex of any characters but these."""
    return re.compile(f"[^{re.escape(stops)}]*")
