"""A session's gRPC streams to its verifier and its drafter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc.aio

from outrider.shared import wire
from outrider.shared.errors import (
    CommitRefused,
    DrafterLost,
    ExactModeRefused,
    InvalidRequest,
    OutriderError,
    Overloaded,
    TargetReplaced,
    Unavailable,
    VerifierLost,
)
from outrider.shared.messages import Commit, DraftStep, ProposalReply, SessionSpec, VerifyStep
from outrider.shared.tracing import Carrier
from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc

# Statuses that blame the request itself; any other one means that the peer is lost.
_STATUS_ERRORS: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: ExactModeRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.ABORTED: CommitRefused,
}


class _Stream:
    """A bidirectional call; reports its end as the error that it means for a session.

    The peer's status is stored as soon as it is known: a write that meets the end makes grpc.aio replace it by
    INTERNAL, and a full verifier would look dead.
    """

    def __init__(self, call: Any, lost: type[Unavailable], peer: str) -> None:
        self._call = call
        self._lost = lost
        self._peer = peer
        self._ending: tuple[grpc.StatusCode, str] | None = None
        call.add_done_callback(self._store_status)

    async def write(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._error() from None

    async def read(self) -> Any:
        """Returns the peer's next message. Raises the reason when there is none."""
        try:
            reply = await self._call.read()
        except grpc.aio.AioRpcError:
            raise await self._error() from None
        if reply is grpc.aio.EOF:
            raise await self._error()
        return reply

    def cancel(self) -> None:
        self._call.cancel()

    def _store_status(self, call: Any) -> None:
        self._ending = (_run_now(call.code()), _run_now(call.details()) or "")

    async def _error(self) -> OutriderError:
        """Returns the error that ended the stream. If a field is at fault, its name and a colon begin the details."""
        code, detail = self._ending or (await self._call.code(), await self._call.details() or "")
        kind = _STATUS_ERRORS.get(code)
        if kind is None:
            return self._lost(f"{self._peer}: {code.name if code else 'stream ended'} {detail}".rstrip())
        param, separator, message = detail.partition(": ")
        if kind is CommitRefused and param == TargetReplaced.PARAM:
            return TargetReplaced(f"{self._peer}: {message}")
        if separator and " " not in param:
            return kind(message, param=param)
        return kind(detail)


def _run_now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that never suspends, without yielding to the event loop."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        return returned.value
    coroutine.close()
    return None


class RemoteVerifier:
    """A session's stream to a verifier (gateway.request.interfaces.Verifier)."""

    def __init__(self, channel: grpc.aio.Channel, address: str, metadata: Carrier = ()) -> None:
        self._stub: Any = verifier_pb2_grpc.VerifierStub(channel)
        self._address = address
        self._metadata = metadata
        self._stream: Any = None  # a _Stream once it is open

    async def open(self, spec: SessionSpec) -> None:
        self._stream = _Stream(self._stub.Session(metadata=self._metadata), VerifierLost, self._address)
        await self._stream.write(wire.open_verifier(spec))

    async def verify(self, step: VerifyStep) -> AsyncIterator[Commit]:
        await self._stream.write(wire.verify_step_to_wire(step))
        more = True
        while more:
            reply = await self._stream.read()
            try:
                commit = wire.commit_from_wire(reply.commit)
            except InvalidRequest as broken:  # the verifier's fault, not the caller's
                raise VerifierLost(f"{self._address}: broken reply: {broken.message}") from None
            more = commit.more
            yield commit

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


class RemoteDrafter:
    """A session's stream to a drafter (gateway.request.interfaces.Drafter).

    Separate tasks read replies and write steps: cancelling a read or a write would end the whole stream, and abandoning
    a proposal must not.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, metadata: Carrier = ()) -> None:
        self._stub: Any = drafter_pb2_grpc.DrafterStub(channel)
        self._address = address
        self._metadata = metadata
        self._stream: Any = None  # a _Stream once it is open
        self._reader: asyncio.Task[None] | None = None
        self._replies: asyncio.Queue[ProposalReply | OutriderError] = asyncio.Queue()
        self._writing: asyncio.Task[None] | None = None

    async def open(self, spec: SessionSpec) -> None:
        self._stream = _Stream(self._stub.Session(metadata=self._metadata), DrafterLost, self._address)
        self._reader = asyncio.create_task(self._read_forever())
        await self._write(wire.open_drafter(spec))

    async def propose(self, step: DraftStep) -> ProposalReply:
        self._writing = asyncio.create_task(self._write_after(self._writing, wire.draft_step_to_wire(step)))
        self._writing.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._writing)
        while True:
            reply = await self._replies.get()
            if isinstance(reply, OutriderError):
                self._replies.put_nowait(reply)  # the next caller gets the same error
                raise reply
            # A reply for another position answers an abandoned step.
            if reply.proposal.base_len == step.committed_len:
                return reply

    async def advance(self, step: DraftStep) -> None:
        await self._write_after(self._writing, wire.draft_step_to_wire(step))

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if self._writing is not None:
            self._writing.cancel()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _read_forever(self) -> None:
        try:
            while True:
                reply = await self._stream.read()
                if reply.WhichOneof("reply") == "proposal":
                    try:
                        self._replies.put_nowait(wire.proposal_reply_from_wire(reply.proposal))
                    except InvalidRequest as broken:  # the drafter's fault, not the caller's
                        raise DrafterLost(f"{self._address}: broken reply: {broken.message}") from None
        except OutriderError as error:
            self._replies.put_nowait(DrafterLost(error.message))

    async def _write_after(self, earlier: asyncio.Task[None] | None, message: Any) -> None:
        """Writes after earlier messages: a stream takes one at a time, and one may belong to an abandoned step."""
        if earlier is not None and not earlier.done():
            await asyncio.wait({earlier})
        await self._write(message)

    async def _write(self, message: Any) -> None:
        try:
            await self._stream.write(message)
        except OutriderError as error:
            raise DrafterLost(error.message) from None


def _retrieve_exception(writing: asyncio.Task[None]) -> None:
    """Marks the error as seen: the caller may be gone, and asyncio would warn."""
    if not writing.cancelled():
        writing.exception()
