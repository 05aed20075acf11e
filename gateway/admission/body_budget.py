"""Bounds the bytes of long bodies and their answers in memory at a time, and how many bodies are worked on.

Parsing and tokenizing a body takes 100 to 230 times its bytes for a moment: twelve of 4 MiB took 2.6 GB.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from outrider.shared.errors import LONG_BODY_RETRY_S, GatewayFull, QuotaExceeded
from outrider.shared.machine.memory import give_back_freed_memory

# bytes; bodies up to this are worked on inline, one after the other, about 1 ms each, and are not counted
INLINE_BYTES = 32 * 1024
# bytes; longer bodies and their answers, of all callers; two of the longest bodies with their answers
_MAX_BYTES = 128 * 2**20
# ratio; bytes of an answer to /tokenize, with the tokens' texts, per byte of its body; 11 for ideograms of which each
# byte is a token, where ids have four digits
ANSWER_RATIO = 14
# share; of _MAX_BYTES, for one API key
_OWNER_SHARE = 0.5
# bodies; parsed and tokenized on threads at a time, and how many of those may be large
_MAX_WORKED_ON, _MAX_LARGE = 2, 1
# bytes; a body over this is large: it takes 0.1 to 0.9 GB and seconds
_LARGE_BYTES = 2**20

T = TypeVar("T")


class BodyBudget:
    """The budget of long bodies, one per gateway, for both of its servers."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: defaultdict[str, int] = defaultdict(int)
        self._turns = asyncio.Semaphore(_MAX_WORKED_ON)
        self._large = asyncio.Semaphore(_MAX_LARGE)

    @property
    def num_bytes(self) -> int:
        return sum(self._held.values())

    async def on_thread(self, work: Callable[[], T], num_bytes: int) -> T:
        """Runs `work` on a body of num_bytes on a thread, in its turn; large bodies leave a thread to the others."""
        if num_bytes <= _LARGE_BYTES:
            return await self._in_turn(work)
        async with self._large:
            return await self._in_turn(lambda: _with_memory_given_back(work))

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Runs `work` on a thread. A cancelled caller's turn ends with the thread, which cannot be stopped."""
        await self._turns.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[T]) -> None:
        self._turns.release()
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio warns where nobody waits any more

    def check(self, owner: str, num_bytes: int) -> None:
        """Raises QuotaExceeded or GatewayFull if num_bytes more do not fit."""
        if num_bytes and owner and self._held[owner] + num_bytes > self._max_bytes * _OWNER_SHARE:
            raise QuotaExceeded(
                "this API key has too many long requests under way; try again when one has been read",
                retry_after_s=LONG_BODY_RETRY_S,
            )
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise GatewayFull(
                "the gateway has too many long requests under way; try again later", retry_after_s=LONG_BODY_RETRY_S
            )

    def count(self, owner: str, num_bytes: int) -> None:
        """Adds to what the owner holds; takes off it where negative."""
        self._held[owner] += num_bytes


def _with_memory_given_back(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_back_freed_memory()


class Held:
    """One request's share of the budget: nothing for its first INLINE_BYTES."""

    def __init__(self, budget: BodyBudget, owner: str = "") -> None:
        self.budget = budget
        self._owner = owner
        self._num_bytes = 0
        self._num_counted = 0

    def add_body(self, num_bytes: int) -> None:
        """Adds bytes of the body. Raises QuotaExceeded or GatewayFull."""
        self.budget.check(self._owner, self._counted(num_bytes) - self._num_counted)
        self.add_answer(num_bytes)

    def add_answer(self, num_bytes: int) -> None:
        """Counts bytes of the answer without a check: a finished answer is always sent."""
        counted = self._counted(num_bytes)
        self.budget.count(self._owner, counted - self._num_counted)
        self._num_bytes, self._num_counted = self._num_bytes + num_bytes, counted

    def _counted(self, num_bytes: int) -> int:
        return max(0, self._num_bytes + num_bytes - INLINE_BYTES)

    def close(self) -> None:
        """Releases all of it. May be called again, and more can be added afterwards."""
        self.budget.count(self._owner, -self._num_counted)
        self._num_bytes = self._num_counted = 0
