"""gateway.request.interfaces over engines in this process: the counterpart of remote.py over gRPC.

An engine replies on its own thread; replies are passed to the session's event loop. Not here: building the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.shared.errors import DrafterLost, OutriderError
from outrider.shared.messages import Commit, DraftStep, ProposalReply, SessionSpec, VerifyStep

if TYPE_CHECKING:  # they load torch
    from outrider.drafter_service.engine import DrafterEngine
    from outrider.verifier_service.engine import VerifierEngine

ReplyT = TypeVar("ReplyT")


class _Replies(Generic[ReplyT]):
    """One session's replies, in order; after an error every further reply is that error."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ReplyT | Exception] = asyncio.Queue()

    def sender(self) -> Callable[[ReplyT | Exception], None]:
        """A function that may be called from any thread."""
        loop = asyncio.get_running_loop()

        def send(reply: ReplyT | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader
                loop.call_soon_threadsafe(self._queue.put_nowait, reply)

        return send

    async def next(self) -> ReplyT:
        reply = await self._queue.get()
        if isinstance(reply, Exception):
            self._queue.put_nowait(reply)
            raise reply
        return reply


class EngineVerifier:
    """A session at a VerifierEngine (gateway.request.interfaces.Verifier)."""

    def __init__(self, engine: VerifierEngine) -> None:
        self._engine = engine
        self._replies: _Replies[Commit] = _Replies()
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


class EngineDrafter:
    """A session at a DrafterEngine (gateway.request.interfaces.Drafter). Any failure there is a lost drafter."""

    def __init__(self, engine: DrafterEngine) -> None:
        self._engine = engine
        self._replies: _Replies[ProposalReply] = _Replies()
        self._handle: int | None = None

    async def open(self, spec: SessionSpec) -> None:
        self._handle = self._engine.open(spec, self._replies.sender())

    async def propose(self, step: DraftStep) -> ProposalReply:
        self._submit(step)
        while True:
            try:
                reply = await self._replies.next()
            except Exception as error:
                raise DrafterLost(str(error)) from error
            # A reply for another position answers an abandoned step.
            if reply.proposal.base_len == step.committed_len:
                return reply

    async def advance(self, step: DraftStep) -> None:
        self._submit(step)

    async def close(self) -> None:
        if self._handle is not None:
            self._engine.close(self._handle)

    def _submit(self, step: DraftStep) -> None:
        if self._handle is None:
            raise OutriderError("a step before open")
        self._engine.submit(self._handle, step)
