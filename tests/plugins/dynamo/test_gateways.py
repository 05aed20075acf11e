"""A stream over several gateways: what a damaged or hostile one costs, and how long none is waited for."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from outrider.plugins.dynamo import gateways as module
from outrider.plugins.dynamo.gateways import Gateways
from outrider.shared.errors import InvalidRequest, OutriderError, Unavailable
from tests.ports import nobodys_port

ROOT = Path(__file__).parents[3]
BODY: dict[str, Any] = {"prompt": [1, 2], "request_id": "a"}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
FIRST = b'id: cmpl-a:1\ndata: {"choices":[{"token_ids":[5]}]}\n\n'
LAST = b'id: cmpl-a:2f\ndata: {"choices":[{"token_ids":[6]}]}\n\ndata: [DONE]\n\n'


class Peer:
    """Answers each connection with the next of its answers, the last one for ever; notes the heads of requests."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = list(answers)
        self.heads: list[str] = []
        self.address = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])
        writer.close()


@asynccontextmanager
async def peer(*answers: bytes) -> AsyncIterator[Peer]:
    made = Peer(answers)
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made


def status(code: int, message: str = "no") -> bytes:
    body = json.dumps({"error": {"message": message}})
    return f"HTTP/1.1 {code} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()


async def tokens_of(*addresses: str, patience_s: float = 20.0) -> list[int]:
    gateways = Gateways(addresses, patience_s)
    try:
        return [token_id async for event in gateways.events(BODY) for token_id in event["choices"][0]["token_ids"]]
    finally:
        await gateways.close()


async def test_the_rest_comes_from_the_next_gateway() -> None:
    async with peer(HEAD + FIRST) as first, peer(HEAD + LAST) as second:
        assert await tokens_of(first.address, second.address) == [5, 6]
    assert first.heads[0].startswith("POST /v1/completions ")
    assert "content-type: application/json" in first.heads[0]
    assert second.heads[0].startswith("GET /v1/streams/cmpl-a ")
    assert "last-event-id: cmpl-a:1" in second.heads[0]


@pytest.mark.parametrize("refusal", [409, 400])
async def test_what_was_begun_before_is_told_from_its_beginning(refusal: int) -> None:
    """400: the rest alone would be no request, with min_tokens above what is left of max_tokens."""
    async with peer(status(refusal), HEAD + FIRST + LAST) as one:
        assert await tokens_of(one.address) == [5, 6]
    assert one.heads[1].startswith("GET /v1/streams/cmpl-a ")
    assert "last-event-id" not in one.heads[1]


async def test_what_is_refused_and_was_not_begun_keeps_its_reason() -> None:
    async with peer(status(400, "min_tokens is wrong"), status(404, "no such request")) as one:
        with pytest.raises(OutriderError, match="min_tokens is wrong"):
            await tokens_of(one.address)


@pytest.mark.parametrize("lost", [b"", HEAD, HEAD + FIRST[:20], status(503), status(502, "")])
async def test_a_gateway_that_is_lost_before_its_first_event_is_asked_anew(lost: bytes) -> None:
    async with peer(lost) as first, peer(HEAD + FIRST + LAST) as second:
        assert await tokens_of(first.address, second.address) == [5, 6]
    assert second.heads[0].startswith("POST /v1/completions ")


async def test_an_error_event_that_says_try_again_is_heard() -> None:
    unavailable = b'data: {"error": {"message": "no verifier", "code": 503}}\n\n'
    async with peer(HEAD + FIRST + unavailable, HEAD + LAST) as one:
        assert await tokens_of(one.address) == [5, 6]


@pytest.mark.parametrize(
    ("answer", "http_status"),
    [
        (status(400), 400),
        (status(401), 401),
        (status(429), 429),
        (status(500), 500),
        (HEAD + b'data: {"error": {"message": "superseded", "code": 409}}\n\n', 409),
        (HEAD + b'data: {"error": {"code": "x"}}\n\n', 500),
        (HEAD + b"data: nonsense\n\n", 500),
        (HEAD + b"data: [1]\n\n", 500),
        (HEAD + b"data: \xff\xfe\n\n", 500),
        (HEAD + b"data: " + b"[" * 100_000 + b"\n\n", 500),
        (HEAD + b"data: " + b"x" * 70_000, 500),
    ],
)
async def test_what_is_refused_or_damaged_ends_that_request(
    answer: bytes, http_status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_LINE_BYTES", 65_536)
    async with peer(answer) as one:
        with pytest.raises(OutriderError) as raised:
            await tokens_of(one.address)
    assert raised.value.http_status == http_status
    assert not isinstance(raised.value, Unavailable)


async def test_patience_ends() -> None:
    with pytest.raises(Unavailable, match="no gateway has served"):
        await tokens_of(f"127.0.0.1:{nobodys_port()}", patience_s=0.3)


async def test_what_is_no_json_is_refused_before_it_is_sent() -> None:
    gateways = Gateways([f"127.0.0.1:{nobodys_port()}"])
    with pytest.raises(InvalidRequest):
        await anext(gateways.events({**BODY, "seed": b"7"}))
    await gateways.close()


VERIFIER = {"healthy": True, "block_size": 16, "num_blocks": 9, "num_free_blocks": 4, "max_sessions": 2}


@pytest.mark.parametrize(
    "answer",
    [
        *(b"[]", b"{}", b"x", b"[" * 60_000, b"x" * 70_000),
        *(json.dumps({"verifiers": views}).encode() for views in ([], [{"healthy": True}], 7, [7])),
        json.dumps({"verifiers": [{**VERIFIER, "num_blocks": [1]}]}).encode(),
    ],
)
async def test_a_fleet_that_tells_nothing_has_no_capacity(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LINE_BYTES", 65_536)
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\nconnection: close\r\n\r\n".encode()
    async with peer(head + answer) as one:
        gateways = Gateways([one.address])
        assert await gateways.capacity() is None
        await gateways.close()


async def test_a_fleet_s_capacity_is_of_the_verifiers_that_serve() -> None:
    body = json.dumps({"verifiers": [VERIFIER, VERIFIER, {**VERIFIER, "healthy": False}]}).encode()
    async with peer(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body) as one:
        gateways = Gateways([one.address])
        assert await gateways.capacity() == module.Capacity(16, 18, 8, 4)
        await gateways.close()


def test_they_need_httpx_only() -> None:
    """Of Outrider the errors alone, and no generated code: what the wheel for Dynamo's workers has."""
    code = "import sys, outrider.plugins.dynamo.gateways, outrider.plugins.dynamo.request; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(run.stdout.split())
    assert {name for name in loaded if name.startswith("outrider.shared.")} == {"outrider.shared.errors"}
    names = {re.split(r"[^\w-]", entry)[0].replace("-", "_") for entry in distribution("outrider").requires or []}
    others = names - {"outrider", "httpx", "rich", "setuptools"}  # httpx loads rich where it is there
    assert {"grpcio", "numpy", "redis", "torch", "transformers"} <= others
    assert loaded & {*others, "grpc", "google.protobuf", "outrider.v1", "uvloop"} == set()
