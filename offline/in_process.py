"""gateway.request.interfaces.Verifier over an engine in this process: the counterpart of remote.py over gRPC.

The engine replies on its own thread; replies are passed to the session's event loop. Not here: building the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from outrider.shared.errors import OutriderError
from outrider.shared.messages import Commit, SessionSpec, VerifyStep

if TYPE_CHECKING:  # it loads torch
    from outrider.verifier_service.engine import VerifierEngine


class _Replies:
    """One session's replies, in order; after an error every further reply is that error."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Commit | Exception] = asyncio.Queue()

    def sender(self) -> Callable[[Commit | Exception], None]:
        """A function that may be called from any thread."""
        loop = asyncio.get_running_loop()

        def send(reply: Commit | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader
                loop.call_soon_threadsafe(self._queue.put_nowait, reply)

        return send

    async def next(self) -> Commit:
        reply = await self._queue.get()
        if isinstance(reply, Exception):
            self._queue.put_nowait(reply)
            raise reply
        return reply


class EngineVerifier:
    """A session at a VerifierEngine (gateway.request.interfaces.Verifier)."""

    def __init__(self, engine: VerifierEngine) -> None:
        self._engine = engine
        self._replies = _Replies()
        self._handle: int | None = None

    async def open(self, spec: SessionSpec) -> None:
        grammar = None
        if spec.sampling_params.grammar is not None:
            # Compiling can take seconds, so it runs on a thread.
            grammar = await asyncio.to_thread(self._engine.compile_grammar, spec)
        self._handle = self._engine.open(spec, self._replies.sender(), grammar)

    async def verify(self, step: VerifyStep) -> AsyncIterator[Commit]:
        if self._handle is None:
            raise OutriderError("verify before open")
        self._engine.submit(self._handle, step)
        more = True
        while more:
            commit = await self._replies.next()
            more = commit.more
            yield commit

    async def close(self) -> None:
        if self._handle is not None:
            self._engine.close(self._handle)
