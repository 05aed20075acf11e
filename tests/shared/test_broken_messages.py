"""Bytes that are no protobuf, in calls whose message gRPC parses itself: the caller's fault, and said so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from outrider.shared import rpc

# A field of wire type 7, which does not exist.
GARBAGE = b"\xff\xff\xff\xff\xff\x0f\x07"


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = await rpc.start_server("127.0.0.1", 0, lambda _server: None, ())
    await server.serving()
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.drain(0)


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
