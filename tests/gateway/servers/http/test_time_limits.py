"""The caller's own time limit, and clients that do not read: both end a request and free all it holds."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_script import Script, ScriptedService, until
from gateway_servers import GatewayServers, open_servers

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.shared import rpc
from outrider.shared.messages import FinishReason, TokenOrigin
from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 60},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
# Nothing blocks before what the kernel and gRPC hold between two ends is full, which takes megabytes.
MANY_WORDS = "word " * 400


@asynccontextmanager
async def servers_with(
    service: ScriptedService, **settings: Any
) -> AsyncIterator[tuple[GatewayServers, httpx.AsyncClient]]:
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0, **settings)) as servers,
        httpx.AsyncClient(base_url=servers.url, timeout=60) as http,
    ):
        yield servers, http


# ---- deadlines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_whole_answer_that_takes_too_long(service: ScriptedService, path: str) -> None:
    service.script = Script(endless=True)
    async with servers_with(service) as (servers, http):
        response = await http.post(path, json=BODIES[path], headers={"x-request-timeout": "2.5"})
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", 504)
        assert error["message"] == "the request took longer than the 2.5 s of x-request-timeout"
        assert (service.num_opened, service.num_open) == (1, 0)
        assert servers.admission.quotas.num_running == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_that_takes_too_long_ends_with_an_error_event(service: ScriptedService, path: str) -> None:
    service.script = Script(endless=True)
    async with servers_with(service) as (servers, http):
        body = {**BODIES[path], "stream": True}
        response = await http.post(path, json=body, headers={"x-request-timeout": "2.5"})
        assert response.status_code == 200
        events = response.text.strip().split("\n\n")
        assert len(events) > 2
        last_line = events[-1].split("\n")[-1]  # behind comments, as the stream waited
        assert json.loads(last_line.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert "[DONE]" not in response.text
        assert service.num_open == 0
        assert servers.admission.quotas.num_running == 0
        assert (await http.get("/health")).status_code == 200  # over the connection that was kept


async def test_a_request_in_time_is_left_alone(service: ScriptedService) -> None:
    async with servers_with(service) as (_, http):
        for stream in (False, True):
            body = {**BODIES[COMPLETIONS], "stream": stream}
            response = await http.post(COMPLETIONS, json=body, headers={"x-request-timeout": "20"})
            assert response.status_code == 200
            assert "error" not in response.text


async def test_a_request_that_waits_for_its_body_ends_in_time_too(service: ScriptedService) -> None:
    async with servers_with(service) as (servers, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", servers.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"x-request-timeout: 0.2\r\ncontent-length: 10\r\n\r\n{")
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 504 ")
        writer.close()


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e9", "5 s"])
async def test_limits_that_are_none(service: ScriptedService, text: str) -> None:
    async with servers_with(service) as (_, http):
        response = await http.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers={"x-request-timeout": text})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-timeout"
        assert service.num_opened == 0


async def test_a_grpc_deadline_frees_everything(service: ScriptedService) -> None:
    service.script = Script(endless=True)
    async with servers_with(service) as (servers, _), rpc.open_channel(servers.grpc_address) as channel:
        stub: Any = pb_grpc.GatewayStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="x"), timeout=3.0)
        assert (await call.read()).text
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: service.num_open == 0)
        await until(lambda: servers.admission.quotas.num_running == 0)


# ---- slow readers -----------------------------------------------------------------------------------------------


class Talkative(ScriptedService):
    """Says `num_updates` times two thousand characters."""

    num_updates = 5_000

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        self.num_open += 1
        try:
            for place in range(self.num_updates):
                last = place + 1 == self.num_updates
                yield GenerationUpdate(
                    choice_index=0,
                    base_len=place,
                    token_ids=(5,),
                    text=MANY_WORDS,
                    token_texts=(MANY_WORDS,),
                    origins=(TokenOrigin.TARGET,),
                    finish_reason=FinishReason.LENGTH if last else None,
                )
        finally:
            self.num_open -= 1


@pytest.fixture
def talkative(tokenizer: Tokenizer) -> Talkative:
    return Talkative(tokenizer)


@asynccontextmanager
async def lazy_client(servers: GatewayServers, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """Sends a request and reads nothing; its buffers are as small as they can be."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", servers.http_port))
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        await loop.sock_sendall(client, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield client


async def test_a_rest_client_that_does_not_read_is_cut(talkative: Talkative, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        servers_with(talkative, slow_reader_timeout_s=0.5) as (servers, http),
        lazy_client(servers, {"prompt": "x", "max_tokens": 400, "stream": True}),
    ):
        await until(lambda: talkative.num_open == 1)
        await until(lambda: talkative.num_open == 0, 60)
        await until(lambda: servers.admission.quotas.num_running == 0)
        # Closing in the ordinary way would wait until the client has read what is still to be sent.
        await until(lambda: servers.num_connections() == 0)
        assert (await http.get("/health")).status_code == 200
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["a client has not read its answer for 0.5 s and is disconnected"]


async def test_a_rest_client_that_reads_slowly_is_not_cut(talkative: Talkative) -> None:
    """Pauses shorter than the limit, for much longer than the limit in all."""
    talkative.num_updates = 100
    async with (
        # So long that a client which a busy machine keeps from reading is not cut.
        servers_with(talkative, slow_reader_timeout_s=3.0) as (servers, _),
        lazy_client(servers, {"prompt": "x", "max_tokens": 400, "stream": True}) as client,
    ):
        loop = asyncio.get_running_loop()
        received = b""
        started = loop.time()
        while b"[DONE]" not in received:
            async with asyncio.timeout(30):
                chunk = await loop.sock_recv(client, 64 * 1024)
            assert chunk, "the connection was cut"
            received += chunk
            if loop.time() - started < 7:
                await asyncio.sleep(0.4)
        assert loop.time() - started > 6


async def test_a_grpc_client_that_does_not_read_is_cut(talkative: Talkative, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        servers_with(talkative, slow_reader_timeout_s=0.5) as (servers, _),
        rpc.open_channel(servers.grpc_address) as channel,
    ):
        stub: Any = pb_grpc.GatewayStub(channel)
        params = common.SamplingParams(max_tokens=400)
        call = stub.Generate(pb.GenerateRequest(prompt="x", sampling_params=params))
        assert await call.read()
        await until(lambda: talkative.num_open == 0, 60)
        await until(lambda: servers.admission.quotas.num_running == 0)
        # What it would read, did it read: the rest that was on its way, and why there is no more.
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED
        assert await call.details() == "the stream was not read for 0.5 s"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "a client has not read its stream for 0.5 s and is disconnected"
    ]
