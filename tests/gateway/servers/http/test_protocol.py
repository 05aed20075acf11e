"""The HTTP server's connections, byte by byte over real sockets: too slow, too large, too many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService, until
from gateway_servers import GatewayServers, open_servers

from outrider.gateway.config import GatewayConfig

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GOOD_HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
# Sooner than uvicorn closes a connection on which nothing happens: after 5 s.
CLOSED_WITHIN_S = 4.0
# Where the clock for heads is not what is tested.
LONG_S = 30.0


@asynccontextmanager
async def quick_servers(service: ScriptedService, **settings: Any) -> AsyncIterator[GatewayServers]:
    times: dict[str, Any] = {"header_timeout_s": 0.5, "body_timeout_s": 0.5}
    async with open_servers(service, GatewayConfig(port=0, grpc_port=0, **{**times, **settings})) as servers:
        yield servers


@asynccontextmanager
async def connected(servers: GatewayServers) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", servers.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader, within_s: float = 30.0) -> tuple[int, dict[str, Any], str]:
    """Status, the error in the body ({} for none), the head; None of the bytes are left."""
    async with asyncio.timeout(within_s):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line[15:]) for line in head.splitlines() if line.startswith("content-length:")), 0)
        body = await reader.readexactly(length)
    error = json.loads(body)["error"] if body else {}
    return int(head.split()[1]), error, head


async def is_closed(reader: asyncio.StreamReader, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await reader.read() == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


# ---- heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: y\r\n" % number for number in range(200)) + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["one long header", "many headers", "a long path"],
)
async def test_heads_that_are_too_big(service: ScriptedService, head: bytes) -> None:
    async with quick_servers(service, header_timeout_s=LONG_S) as servers, connected(servers) as (reader, writer):
        writer.write(head)
        status, error, text = await answer(reader)
        assert (status, error["code"], error["type"]) == (431, 431, "invalid_request_error")
        assert "connection: close" in text
        assert await is_closed(reader, CLOSED_WITHIN_S)


async def test_a_header_without_end_is_not_collected(service: ScriptedService) -> None:
    """The parser tells nothing of a header before its end, so the bytes must be counted as they come."""
    async with quick_servers(service, header_timeout_s=30.0) as servers, connected(servers) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        answered = asyncio.create_task(answer(reader))
        num_sent = 0
        while not answered.done() and num_sent < 4_000_000:
            writer.write(b"a" * 8192)
            num_sent += 8192
            await asyncio.sleep(0.001)
        assert (await answered)[0] == 431
        assert num_sent < 1_000_000


async def test_heads_within_the_limits_pass(service: ScriptedService) -> None:
    headers = {f"x-{number}": "y" * 500 for number in range(80)}
    async with (
        quick_servers(service, header_timeout_s=LONG_S) as servers,
        httpx.AsyncClient(base_url=servers.url, timeout=LONG_S) as http,
    ):
        assert (await http.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("start", [b"", b"\r\n", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\nx: "])
async def test_a_slow_head_is_cut(service: ScriptedService, start: bytes) -> None:
    """Slow loris: every byte comes in time, the head never ends."""
    async with quick_servers(service) as servers, connected(servers) as (reader, writer):

        async def drip() -> None:
            writer.write(start)
            while start:
                await asyncio.sleep(0.1)
                writer.write(start[-1:])

        dripping = asyncio.create_task(drip())
        status, error, _ = await answer(reader)
        dripping.cancel()
        assert (status, error["message"]) == (408, "no request within 0.5 s")
        assert await is_closed(reader, CLOSED_WITHIN_S)


async def test_a_slow_head_on_a_connection_that_was_kept(service: ScriptedService) -> None:
    async with quick_servers(service) as servers, connected(servers) as (reader, writer):
        for _ in range(3):
            writer.write(GOOD_HEAD)
            assert (await answer(reader))[0] == 200
        writer.write(b"GET /")
        assert (await answer(reader))[0] == 408


async def test_kept_connections_and_long_answers_are_left_alone(service: ScriptedService) -> None:
    """The clocks run while the client has to speak, and at no other time."""
    service.script = Script(delay_s=0.15)
    body = json.dumps({"prompt": "x", "max_tokens": 60}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    async with quick_servers(service) as servers, connected(servers) as (reader, writer):
        writer.write(head.encode() + b"\r\n\r\n" + body)
        started = asyncio.get_running_loop().time()
        async with asyncio.timeout(60):
            text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(int(line[15:]) for line in text.splitlines() if line.startswith("content-length:"))
            await reader.readexactly(length)
        assert text.startswith("http/1.1 200 ")
        assert asyncio.get_running_loop().time() - started > 0.6
        await asyncio.sleep(1.0)  # longer than both clocks, shorter than uvicorn's own 5 s for an idle connection
        writer.write(GOOD_HEAD)
        assert (await answer(reader))[0] == 200


async def test_what_is_no_http(service: ScriptedService) -> None:
    async with quick_servers(service, header_timeout_s=LONG_S) as servers, connected(servers) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, error, _ = await answer(reader)
        assert (status, error["type"]) == (400, "invalid_request_error")


# ---- bodies -----------------------------------------------------------------------------------------------------


async def drip_body(writer: asyncio.StreamWriter, path: bytes) -> None:
    writer.write(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: 100000\r\n\r\n{")
    while True:
        await asyncio.sleep(0.05)
        writer.write(b" ")


async def test_a_slow_body_is_refused(service: ScriptedService) -> None:
    async with quick_servers(service, header_timeout_s=LONG_S) as servers, connected(servers) as (reader, writer):
        dripping = asyncio.create_task(drip_body(writer, b"/v1/completions"))
        status, error, head = await answer(reader)
        assert (status, error["message"]) == (408, "the body did not arrive within 0.5 s")
        assert "connection: close" in head
        dripping.cancel()
        assert await is_closed(reader, CLOSED_WITHIN_S)


async def test_a_body_that_nobody_reads_has_an_end_too(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/ping answers without reading; the connection must not stay open for as long as bytes drip in."""
    monkeypatch.setattr("outrider.gateway.servers.http.protocol._BODY_GRACE_S", 0.5)
    async with quick_servers(service, header_timeout_s=LONG_S) as servers, connected(servers) as (reader, writer):
        dripping = asyncio.create_task(drip_body(writer, b"/ping"))
        assert (await answer(reader))[0] == 200
        assert await is_closed(reader, CLOSED_WITHIN_S)
        dripping.cancel()


# ---- connections ------------------------------------------------------------------------------------------------


HALF_A_BODY = (
    b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"p'
)
STREAM = b'{"prompt": "x", "stream": true}'
STREAM_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


@pytest.mark.parametrize("half", [b"", b"GET /hea", HALF_A_BODY, GOOD_HEAD], ids=["none", "head", "body", "kept"])
async def test_connections_without_a_request_give_way(service: ScriptedService, half: bytes) -> None:
    """The one that has waited longest: silent, in its head, in its body, or kept after an answer."""
    async with quick_servers(service, max_connections=3, header_timeout_s=LONG_S, body_timeout_s=LONG_S) as servers:
        held = []
        for _ in range(3):
            held.append(await asyncio.open_connection("127.0.0.1", servers.http_port))
            held[-1][1].write(half)
            if half is GOOD_HEAD:
                assert (await answer(held[-1][0]))[0] == 200
            await asyncio.sleep(0.02)
        await until(lambda: servers.num_connections() == 3)
        async with connected(servers) as (reader, writer):
            writer.write(GOOD_HEAD)
            assert (await answer(reader))[0] == 200
            status, error, head = await answer(held[0][0])
            assert (status, error["type"]) == (503, "service_unavailable_error")
            assert "retry-after: 1" in head
            assert await is_closed(held[0][0], CLOSED_WITHIN_S)
            assert not await is_closed(held[1][0], 0.1)
        for _, writer in held:
            writer.close()


async def test_connections_that_are_being_answered_do_not(service: ScriptedService) -> None:
    service.script = Script(endless=True)
    async with quick_servers(service, max_connections=2, header_timeout_s=LONG_S) as servers:
        held = [await asyncio.open_connection("127.0.0.1", servers.http_port) for _ in range(2)]
        for reader, writer in held:
            writer.write(STREAM_HEAD % len(STREAM) + STREAM)
            await reader.readuntil(b"data: ")
        async with connected(servers) as (reader, _):
            assert (await answer(reader))[0] == 503
            assert await is_closed(reader, CLOSED_WITHIN_S)
        for reader, writer in held:
            await reader.readuntil(b"data: ")
            writer.close()


async def test_a_body_that_comes_together_with_its_head_is_no_part_of_it(service: ScriptedService) -> None:
    """On a busy gateway a whole request is read at once; its 100 kB were refused as a head too big."""
    body = json.dumps({"prompt": "word " * 20_000}).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    async with quick_servers(service) as servers, connected(servers) as (reader, writer):
        for _ in range(3):
            writer.write(head.encode() + body)
            head_of_answer = await reader.readuntil(b"\r\n\r\n")
            assert head_of_answer.startswith(b"HTTP/1.1 200")
            length = int(head_of_answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
