"""Which session a row of an engine's batch continues, where the engine does not say which request a row is.

A row is recognised by its tokens. Two rows with the same tokens are interchangeable, since a draft depends on tokens
alone; a wrong match costs a bad draft, never a wrong output.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from outrider.plugins.link import Link

# tokens; end of a text that is compared
_TAIL = 64
Tokens = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(eq=False)
class Session:
    """A text of the engine: its length, and what its drafter has of it.

    generation: of the link, when it was opened there. open_len: length of the text at that time. sent_len: length of
    what the drafter has of it. owes: asked, and not answered yet.
    """

    number: int
    length: int = 0
    tail: bytes = b""
    seen_at: float = 0.0
    link: Link | None = None
    generation: int = 0
    open_len: int = 0
    sent_len: int = 0
    owes: bool = False


class Rows:
    """The sessions of one engine. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._by_row: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def match(self, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any) -> list[Session]:
        """Returns each row's session, with the row's length.

        sampled: tokens committed in this step. num_tokens [rows]: they included. token_ids [rows, longest text].
        """
        lengths = [int(num_tokens[row]) for row in range(len(sampled))]
        # In the step before; vLLM leaves a step out where a text is near the end of the context.
        before = [length - len(new) for length, new in zip(lengths, sampled, strict=True)]
        found: list[Session | None] = [None] * len(sampled)
        for row, session in enumerate(self._by_row[: len(sampled)]):
            if session.length == before[row] and _tail(token_ids[row], before[row]) == session.tail:
                found[row] = session
        if None in found:
            self._find_elsewhere(found, before, token_ids)
        now = time.monotonic()
        matched = [session for session in found if session is not None]
        for row, session in enumerate(matched):
            session.length, session.tail = lengths[row], _tail(token_ids[row], lengths[row])
            session.seen_at = now
        self._by_row = matched
        return matched

    def forget_unseen(self, seconds: float) -> list[Session]:
        """Removes and returns the sessions without a row for so long: ended, or preempted."""
        limit = time.monotonic() - seconds
        old = [session for session in self._sessions.values() if session.seen_at < limit]
        for session in old:
            del self._sessions[session.number]
        self._by_row = [] if old else self._by_row
        return old

    def _find_elsewhere(self, found: list[Session | None], before: Sequence[int], token_ids: Any) -> None:
        """Finds the sessions of rows that have moved, then of those that went on unseen; the others are new."""
        taken = {session.number for session in found if session is not None}
        others: dict[tuple[int, bytes], list[Session]] = defaultdict(list)
        for session in self._sessions.values():
            if session.number not in taken:
                others[session.length, session.tail].append(session)
        missing = [row for row, session in enumerate(found) if session is None]
        for row in missing:
            candidates = others.get((before[row], _tail(token_ids[row], before[row])))
            if candidates:
                moved = found[row] = candidates.pop()
                taken.add(moved.number)
        for row in missing:
            old = self._by_row[row] if found[row] is None and row < len(self._by_row) else None
            if old is not None and old.number not in taken and old.length <= before[row]:
                found[row] = old if _tail(token_ids[row], old.length) == old.tail else None
            found[row] = found[row] or self._new()

    def _new(self) -> Session:
        session = Session(next(self._numbers))
        self._sessions[session.number] = session
        return session


def _tail(row: Tokens, length: int) -> bytes:
    return row[max(0, length - _TAIL) : length].tobytes()
