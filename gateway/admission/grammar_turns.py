"""Bounds the new grammars that one caller may have compiled at a time, so that they do not hold up other callers.

A grammar is new until an output has been decoded with it here. A service sends the same few schemas again and again,
and so does not wait.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from outrider.shared.sampling_params import Grammar

# grammars; new ones of one owner that verifiers compile at a time; their queues hold 8
# (engine/sampling/grammar_check.py)
_MAX_NEW = 2
# grammars; remembered as decoded with; the least recently used is forgotten first
_MAX_KNOWN = 1024


class GrammarTurns:
    """Turns at compiling new grammars. Owners are the names of API keys; without keys all callers are one."""

    def __init__(self) -> None:
        self._room: dict[str, asyncio.Semaphore] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def take(self, owner: str, grammar: Grammar | None) -> Turn:
        """Waits for room, unless there is no grammar or a known one."""
        if grammar is None or (digest := _digest(grammar)) in self._known:
            return Turn(self, None, b"")
        room = self._room.setdefault(owner, asyncio.Semaphore(_MAX_NEW))
        await room.acquire()
        return Turn(self, room, digest)

    def learn(self, digest: bytes) -> None:
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


class Turn:
    """A turn of a request, which ends with its first tokens or with the request."""

    def __init__(self, turns: GrammarTurns, room: asyncio.Semaphore | None, digest: bytes) -> None:
        self._turns = turns
        self._room = room
        self._digest = digest

    def end(self, *, decoded: bool) -> None:
        """Ends the turn; further calls do nothing. decoded: tokens have come, so the grammar is known from now on."""
        if self._room is None:
            return
        if decoded:
            self._turns.learn(self._digest)
        self._room.release()
        self._room = None


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind.value} {grammar.text}".encode()).digest()
