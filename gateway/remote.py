"""The gRPC side of the seam: one session's stream to a verifier and to a drafter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from shared import wire
from shared.errors import (
    CommitRefused,
    DrafterLost,
    ExactModeRefused,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unavailable,
    VerifierLost,
    WriteFailed,
)
from shared.messages import Commit, DraftStep, ProposalReply, SessionSpec, SteerRun, VerifyStep
from shared.tracing import Carrier

# A status that says the request itself is at fault; every other one means that the peer is lost.
_STATUS_ERRORS: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: ExactModeRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.ABORTED: CommitRefused,
}
# What grpc.aio puts in the place of the peer's own status when a write comes after the peer has ended the stream.
_LOCAL_WRITE_FAILURE = (grpc.StatusCode.INTERNAL, "Internal error from Core")


async def _error_of(call: Any, lost: type[Unavailable], peer: str) -> OutriderError:
    """Why a stream has ended. The detail of a request's fault starts with the field's name and a colon."""
    code, detail = await call.code(), await call.details() or ""
    if (code, detail) == _LOCAL_WRITE_FAILURE and lost is VerifierLost:
        return WriteFailed(f"{peer}: the stream ended while it was written to")
    kind = _STATUS_ERRORS.get(code)
    if kind is None:
        return lost(f"{peer}: {code.name if code else 'stream ended'} {detail}".rstrip())
    param, separator, message = detail.partition(": ")
    if separator and " " not in param:
        return kind(message, param=param)
    return kind(detail)


class RemoteVerifier:
    """One session's stream to a verifier (gateway.interfaces.Verifier)."""

    def __init__(self, channel: grpc.aio.Channel, address: str, metadata: Carrier = ()) -> None:
        self._stub: Any = verifier_pb2_grpc.VerifierStub(channel)
        self._address = address
        self._metadata = metadata
        self._call: Any = None

    async def open(self, spec: SessionSpec) -> None:
        self._call = self._stub.Session(metadata=self._metadata)
        await self._write(wire.open_verifier(spec))

    async def verify(self, step: VerifyStep) -> AsyncIterator[Commit]:
        await self._write(wire.verify_step_to_wire(step))
        more = True
        while more:
            reply = await self._read()
            try:
                commit = wire.commit_from_wire(reply.commit)
            except InvalidRequest as broken:  # the verifier's fault, not the caller's
                raise VerifierLost(f"{self._address}: broken reply: {broken.message}") from None
            more = commit.more
            yield commit

    async def steer(self, steer: SteerRun) -> None:
        await self._write(wire.steer_to_wire(steer))

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _write(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await _error_of(self._call, VerifierLost, self._address) from None

    async def _read(self) -> Any:
        try:
            reply = await self._call.read()
        except grpc.aio.AioRpcError:
            raise await _error_of(self._call, VerifierLost, self._address) from None
        if reply is grpc.aio.EOF:
            raise await _error_of(self._call, VerifierLost, self._address)
        return reply


class RemoteDrafter:
    """One session's stream to a drafter (gateway.interfaces.Drafter).

    Replies are read, and steps written, by tasks of their own: cancelling a read or a write would end the whole stream,
    and a proposal that is no longer waited for must not.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, metadata: Carrier = ()) -> None:
        self._stub: Any = drafter_pb2_grpc.DrafterStub(channel)
        self._address = address
        self._metadata = metadata
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._replies: asyncio.Queue[ProposalReply | OutriderError] = asyncio.Queue()
        self._writing: asyncio.Task[None] | None = None

    async def open(self, spec: SessionSpec) -> None:
        self._call = self._stub.Session(metadata=self._metadata)
        self._reader = asyncio.create_task(self._read_forever())
        await self._write(wire.open_drafter(spec))

    async def propose(self, step: DraftStep) -> ProposalReply:
        self._writing = asyncio.create_task(self._write_after(self._writing, wire.draft_step_to_wire(step)))
        self._writing.add_done_callback(_taken_note_of)
        await asyncio.shield(self._writing)
        while True:
            reply = await self._replies.get()
            if isinstance(reply, OutriderError):
                self._replies.put_nowait(reply)  # whoever asks next gets the same answer
                raise reply
            # A reply that stands elsewhere answers a step that was given up.
            if reply.proposal.base_len == step.committed_len:
                return reply

    async def advance(self, step: DraftStep) -> None:
        await self._write_after(self._writing, wire.draft_step_to_wire(step))

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._writing is not None:
            self._writing.cancel()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _read_forever(self) -> None:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                if reply.WhichOneof("reply") == "proposal":
                    self._replies.put_nowait(wire.proposal_reply_from_wire(reply.proposal))
        except grpc.aio.AioRpcError:
            pass
        except OutriderError as broken:
            self._replies.put_nowait(DrafterLost(f"{self._address}: broken reply: {broken.message}"))
            return
        error = await _error_of(self._call, DrafterLost, self._address)
        self._replies.put_nowait(DrafterLost(error.message))

    async def _write_after(self, earlier: asyncio.Task[None] | None, message: Any) -> None:
        """A stream takes one message at a time, and the one before may belong to a step that was given up."""
        if earlier is not None and not earlier.done():
            await asyncio.wait({earlier})
        await self._write(message)

    async def _write(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            error = await _error_of(self._call, DrafterLost, self._address)
            raise DrafterLost(error.message) from None


def _taken_note_of(writing: asyncio.Task[None]) -> None:
    """Whoever asked may have given up: nobody else looks at what the write failed with."""
    if not writing.cancelled():
        writing.exception()
