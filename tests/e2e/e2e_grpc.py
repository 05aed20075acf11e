"""Raw gRPC: bytes in, bytes out, so that a test can send what no stub would; and sessions that behave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

VERIFIER_SESSION = "/outrider.v1.Verifier/Session"
DRAFTER_SESSION = "/outrider.v1.Drafter/Session"
GREEDY = common_pb2.SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@dataclass(frozen=True)
class Ended:
    """How a call ended, and what came before."""

    code: grpc.StatusCode
    details: str
    replies: list[bytes]


async def call_raw(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes], timeout_s: float = 30) -> Ended:
    """A stream-stream call with these messages, read to its end. Without messages it is half-closed at once.

    Else it stays open until the server ends it: the end of a session's stream would end the session before its reply.
    """
    for attempt in range(10):
        ended = await _call_once(channel, method, messages, timeout_s)
        # The client's own word where the server ended the stream while a message was being written still: the server's
        # reason is lost. On two busy cores it has happened ten times in a row, at once: what keeps them busy must pass.
        if ended.details != "Internal error from Core":
            break
        await asyncio.sleep(0.1 * attempt)
    return ended


async def _call_once(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes], timeout_s: float) -> Ended:
    call: Any = channel.stream_stream(method)(timeout=timeout_s)
    replies: list[bytes] = []
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            await call.write(message)
        if not messages:
            await call.done_writing()
    with suppress(grpc.aio.AioRpcError):
        async for reply in call:
            replies.append(reply)
    return Ended(await call.code(), await call.details() or "", replies)


async def call_unary(channel: grpc.aio.Channel, method: str, message: bytes) -> Ended:
    """A unary call."""
    method_call: Any = channel.unary_unary(method)
    call = method_call(message, timeout=30)
    return Ended(await call.code(), await call.details() or "", [])


def open_verifier(**changes: Any) -> bytes:
    """A good `open`, with changes."""
    fields = {
        "session_id": "raw",
        "prompt_token_ids": [40, 41, 42, 43],
        "sampling_params": GREEDY,
        "mode": common_pb2.SPECULATION_MODE_EXACT,
        **changes,
    }
    message = verifier_pb2.VerifierRequest(open=verifier_pb2.OpenVerifierSession(**fields))
    return message.SerializeToString()


def verify(**fields: Any) -> bytes:
    return verifier_pb2.VerifierRequest(step=verifier_pb2.VerifyStep(**fields)).SerializeToString()


def open_drafter(**changes: Any) -> bytes:
    fields = {
        "session_id": "raw",
        "method": "draft_model",
        "prompt_token_ids": [40, 41, 42, 43],
        "sampling_params": GREEDY,
        "mode": common_pb2.SPECULATION_MODE_EXACT,
        **changes,
    }
    return drafter_pb2.DrafterRequest(open=drafter_pb2.OpenDrafterSession(**fields)).SerializeToString()


def draft(**fields: Any) -> bytes:
    return drafter_pb2.DrafterRequest(step=drafter_pb2.DraftStep(**fields)).SerializeToString()


@dataclass
class Bystander:
    """A session that goes on in the background."""

    token_ids: list[int] = field(default_factory=list)
    replied: asyncio.Event = field(default_factory=asyncio.Event)

    async def goes_on(self, timeout_s: float = 30) -> None:
        """Returns after another reply; fails the test when none comes."""
        self.replied.clear()
        async with asyncio.timeout(timeout_s):
            await self.replied.wait()


@asynccontextmanager
async def verifier_bystander(channel: grpc.aio.Channel) -> AsyncIterator[None]:
    """A session at the verifier that steps on and on; an error of its stream is raised at the end."""
    seen = Bystander()
    call: Any = verifier_pb2_grpc.VerifierStub(channel).Session()

    async def run() -> None:
        await call.write(verifier_pb2.VerifierRequest.FromString(open_verifier(session_id="bystander")))
        while True:
            step = verifier_pb2.VerifyStep(base_len=len(seen.token_ids))
            await call.write(verifier_pb2.VerifierRequest(step=step))
            reply = await call.read()
            seen.token_ids.extend(reply.commit.token_ids)
            seen.replied.set()

    async with _running(call, run(), seen):
        yield


@asynccontextmanager
async def drafter_bystander(channel: grpc.aio.Channel) -> AsyncIterator[None]:
    """A session at the drafter that asks for draft after draft and commits the first token of each."""
    seen = Bystander()
    call: Any = drafter_pb2_grpc.DrafterStub(channel).Session()

    async def run() -> None:
        await call.write(drafter_pb2.DrafterRequest.FromString(open_drafter(session_id="bystander")))
        committed: list[int] = []
        while True:
            base_len = len(seen.token_ids) - len(committed)
            step = drafter_pb2.DraftStep(base_len=base_len, committed_token_ids=committed, num_draft_tokens=2)
            await call.write(drafter_pb2.DrafterRequest(step=step))
            reply = await call.read()
            committed = list(reply.proposal.proposal.token_ids[:1])
            seen.token_ids.extend(committed)
            seen.replied.set()

    async with _running(call, run(), seen):
        yield


@asynccontextmanager
async def _running(call: Any, work: Any, seen: Bystander) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        await seen.goes_on()
        yield
        await seen.goes_on()
    finally:
        if not task.done():
            task.cancel()
        call.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    if not isinstance(outcome, asyncio.CancelledError):
        raise AssertionError(f"the bystander's session ended: {outcome!r}")
