"""One stream, one session, over real gRPC: what ends a stream, and that it ends nobody else's.

The servicer is the drafter's own with the n-gram method: it needs no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafter_service.server import DrafterServicer
from outrider.drafting.methods.ngram import NgramMethod
from outrider.shared import rpc, wire
from outrider.shared.errors import ConfigError
from outrider.shared.messages import DrafterInfo, DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.v1 import drafter_pb2, drafter_pb2_grpc

PROMPT = (5, 6, 7, 5, 6)
NUM_SESSIONS = 4
# Nothing takes so long but on a machine that is busy otherwise.
LONG_S = 30.0


@dataclass
class Served:
    server: rpc.Server
    engine: DrafterEngine
    channel: grpc.aio.Channel

    def stream(self) -> Any:
        return drafter_pb2_grpc.DrafterStub(self.channel).Session()

    async def until_sessions(self, count: int) -> None:
        async with asyncio.timeout(LONG_S):
            while self.engine.num_sessions != count:  # noqa: ASYNC110 the engine's thread has no event for this
                await asyncio.sleep(0.005)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    methods = {"ngram": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)}
    engine = DrafterEngine(methods, max_num_seqs=NUM_SESSIONS, metrics=DrafterMetrics(CollectorRegistry()))
    info = DrafterInfo("test", tuple(method.info for method in methods.values()), 1, 0, NUM_SESSIONS)
    servicer = DrafterServicer(engine, lambda: info)
    server = await rpc.start_server(
        "127.0.0.1",
        0,
        lambda grpc_server: drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, grpc_server),
        ("outrider.v1.Drafter",),
    )
    engine.start()
    await server.serving()
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    yield Served(server, engine, channel)
    await channel.close()
    await server.drain(0.0)
    engine.stop()


def open_message(name: str = "s", method: str = "ngram") -> drafter_pb2.DrafterRequest:
    spec = SessionSpec(name, 1, PROMPT, (), SamplingParams(), SpeculationMode.REJECTION, 0, method=method)
    return wire.open_drafter(spec)


def step_message(base_len: int = 0, tokens: tuple[int, ...] = (), epoch: int = 1) -> drafter_pb2.DrafterRequest:
    return wire.draft_step_to_wire(DraftStep(epoch, base_len, tokens, num_draft_tokens=2))


async def ask(stream: Any, request: drafter_pb2.DrafterRequest) -> tuple[int, ...]:
    await stream.write(request)
    reply = await stream.read()
    if reply is grpc.aio.EOF:
        raise AssertionError(f"the stream ended: {await stream.code()} {await stream.details()}")
    return wire.proposal_reply_from_wire(reply.proposal).proposal.token_ids


async def opened(served: Served, name: str = "s") -> Any:
    stream = served.stream()
    await stream.write(open_message(name))
    return stream


async def status_of(stream: Any, *requests: Any) -> tuple[grpc.StatusCode, str]:
    try:
        async with asyncio.timeout(LONG_S):
            for request in requests:
                await stream.write(request)
            reply = await stream.read()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"the stream goes on: {reply}")


async def test_open_then_steps(served: Served) -> None:
    stream = await opened(served)
    assert await ask(stream, step_message()) == (7, 5)
    assert await ask(stream, step_message(0, (7, 9))) == ()
    assert await ask(stream, step_message(2, (7,))) == (9, 7)
    await stream.done_writing()
    async with asyncio.timeout(LONG_S):
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK
    await served.until_sessions(0)


async def test_a_cancelled_stream_closes_its_session(served: Served) -> None:
    stream = await opened(served)
    await ask(stream, step_message())
    await served.until_sessions(1)
    stream.cancel()
    await served.until_sessions(0)


async def test_a_channel_that_breaks_closes_its_session(served: Served) -> None:
    channel = rpc.open_channel(f"127.0.0.1:{served.server.port}")
    stream = drafter_pb2_grpc.DrafterStub(channel).Session()
    await stream.write(open_message())
    await ask(stream, step_message())
    await served.until_sessions(1)
    await channel.close()
    await served.until_sessions(0)


@pytest.mark.parametrize(
    ("requests", "code", "words"),
    [
        ([step_message()], grpc.StatusCode.INVALID_ARGUMENT, "open"),
        ([drafter_pb2.DrafterRequest()], grpc.StatusCode.INVALID_ARGUMENT, "open"),
        ([open_message(), open_message()], grpc.StatusCode.INVALID_ARGUMENT, "step"),
        ([open_message(), drafter_pb2.DrafterRequest()], grpc.StatusCode.INVALID_ARGUMENT, "step"),
        ([open_message(method="psychic")], grpc.StatusCode.INVALID_ARGUMENT, "psychic"),
        ([open_message(), step_message(epoch=2)], grpc.StatusCode.ABORTED, "epoch"),
        ([open_message(), step_message(base_len=9)], grpc.StatusCode.INVALID_ARGUMENT, "9"),
        ([open_message(), step_message(tokens=(-1,))], grpc.StatusCode.INVALID_ARGUMENT, "vocabulary"),
    ],
)
async def test_a_bad_message_ends_its_own_stream_and_no_other(
    served: Served, requests: list[Any], code: grpc.StatusCode, words: str
) -> None:
    peer = await opened(served, "peer")
    assert await ask(peer, step_message()) == (7, 5)
    found, details = await status_of(served.stream(), *requests)
    assert (found, words in details) == (code, True), details
    await served.until_sessions(1)
    assert await ask(peer, step_message(0, (7,))) == (5, 6)
    peer.cancel()


async def test_broken_protobuf_ends_its_own_stream_and_no_other(served: Served) -> None:
    peer = await opened(served, "peer")
    raw = served.channel.stream_stream("/outrider.v1.Drafter/Session")()
    code, _ = await status_of(raw, b"\xff\xff\xff\xff")
    assert code is not grpc.StatusCode.OK
    assert await ask(peer, step_message()) == (7, 5)
    peer.cancel()


async def test_a_stream_that_ends_before_it_opened_is_told_so(served: Served) -> None:
    stream = served.stream()
    await stream.done_writing()
    code, details = await status_of(stream)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "before it sent a request" in details


async def test_too_many_sessions_are_refused_and_room_comes_back(served: Served) -> None:
    streams = []
    for number in range(NUM_SESSIONS):
        streams.append(await opened(served, str(number)))
        await ask(streams[-1], step_message())
    code, _ = await status_of(served.stream(), open_message("one too many"))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    streams.pop().cancel()
    await served.until_sessions(NUM_SESSIONS - 1)
    late = await opened(served, "late")
    assert await ask(late, step_message()) == (7, 5)
    for stream in (late, *streams):
        stream.cancel()


async def test_health_says_serving_until_draining(served: Served) -> None:
    assert await rpc.is_serving(served.channel, timeout_s=LONG_S)
    stream = await opened(served)
    await ask(stream, step_message())
    drain = asyncio.create_task(served.server.drain(LONG_S))
    await asyncio.sleep(0.05)
    assert await ask(stream, step_message(0, (7,))) == (5, 6), "a running session may finish while draining"
    assert not await rpc.is_serving(served.channel, timeout_s=1.0)
    await stream.done_writing()
    async with asyncio.timeout(LONG_S):
        await drain


async def test_get_info(served: Served) -> None:
    reply = await drafter_pb2_grpc.DrafterStub(served.channel).GetInfo(drafter_pb2.GetDrafterInfoRequest())
    assert [method.name for method in wire.drafter_info_from_wire(reply).methods] == ["ngram"]


async def test_two_servers_on_one_port_fail_loudly(served: Served) -> None:
    with pytest.raises(ConfigError, match=f"--port: cannot listen on 127.0.0.1:{served.server.port}: "):
        await rpc.start_server("127.0.0.1", served.server.port, lambda _server: None, ())
