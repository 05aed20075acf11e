"""Calls whose first message is broken, or does not come: the caller's fault, and no other caller's loss."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from outrider.shared import rpc
from outrider.shared.errors import Overloaded
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc

# A field of wire type 7, which does not exist.
GARBAGE = b"\xff\xff\xff\xff\xff\x0f\x07"


CHECK = "/grpc.health.v1.Health/Check"
MAX_WAITING = 4


@asynccontextmanager
async def served(first_message_s: float = 60.0) -> AsyncIterator[grpc.aio.Channel]:
    options = rpc.ServerOptions(max_waiting=MAX_WAITING, first_message_s=first_message_s)
    server = await rpc.start_server("127.0.0.1", 0, lambda _server: None, (), options)
    await server.serving()
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.drain(0)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with served() as channel:
        yield channel


async def test_a_unary_call(channel: grpc.aio.Channel) -> None:
    check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
    with pytest.raises(grpc.aio.AioRpcError, match="broken protobuf") as caught:
        await check(GARBAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert health_pb2.HealthCheckResponse.FromString(await check(b"")).status == 1


async def test_a_call_that_is_answered_with_a_stream(channel: grpc.aio.Channel) -> None:
    watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
    with pytest.raises(grpc.aio.AioRpcError, match="broken protobuf") as caught:
        await watch(GARBAGE).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    call = watch(b"")
    assert health_pb2.HealthCheckResponse.FromString(await call.read()).status == 1
    call.cancel()


class Refusing(pb_grpc.GatewayServicer):
    """Refuses a call once its client has reset it, in the same turn of the loop, so that gRPC has not said so yet."""

    def __init__(self) -> None:
        self.has_begun, self.is_reset = threading.Event(), threading.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        self.has_begun.set()
        try:
            self.is_reset.wait(timeout=30.0)
            time.sleep(0.2)  # noqa: ASYNC251 - the reset arrives, on a thread of gRPC's; later it would be an ordinary refusal
            await rpc.abort(context, Overloaded("full"))
        except Exception as error:
            await rpc.abort(context, error)
        yield pb.GenerateReply()


async def test_a_call_that_was_reset_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    service = Refusing()

    def begin_and_reset(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = pb_grpc.GatewayStub(channel).Generate(pb.GenerateRequest(prompt="a"))
            assert service.has_begun.wait(timeout=30.0)
            call.cancel()
            service.is_reset.set()

    server = await rpc.start_server(
        "127.0.0.1", 0, lambda server: pb_grpc.add_GatewayServicer_to_server(service, server), ()
    )
    await asyncio.to_thread(begin_and_reset, server.port)
    await server.drain(0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# ---- messages that do not come ------------------------------------------------------------------------------------


async def test_a_call_without_a_message_ends_in_time() -> None:
    async with served(first_message_s=0.3) as channel:
        for method in (CHECK, "/grpc.health.v1.Health/Watch"):
            call: Any = channel.stream_stream(method)()
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "the request did not arrive within 0.3 s"


async def test_a_call_that_ends_without_a_message_is_refused(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream(CHECK)()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", [CHECK, "/grpc.health.v1.Health/Watch"], ids=["silent", "watching for ever"])
async def test_calls_that_hold_places_give_way_to_whole_ones(channel: grpc.aio.Channel, method: str) -> None:
    """The oldest ends first; a call beside them is answered, however many there are."""
    open_call, check = channel.stream_stream(method), channel.unary_unary(CHECK)
    calls: list[Any] = []
    for _ in range(3 * MAX_WAITING):
        calls.append(open_call())
        if method != CHECK:
            await calls[-1].write(b"")
            await calls[-1].read()
        assert health_pb2.HealthCheckResponse.FromString(await check(b"")).status == 1  # type: ignore[misc]
    for call in calls[:MAX_WAITING]:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "too many calls" in (await call.details() or "")
    assert not calls[-1].done()
    for call in calls:
        call.cancel()


def test_who_gives_way() -> None:
    """The oldest of the peer that has most, not the oldest of all."""
    assert rpc.first_to_go([]) is None
    waiting = [("one", 1.0, "a"), ("many", 4.0, "d"), ("many", 2.0, "b"), ("other", 0.0, "c")]
    assert rpc.first_to_go(waiting) == "b"
    assert rpc.first_to_go([("one", 2.0, "a"), ("other", 1.0, "b")]) in ("a", "b")
