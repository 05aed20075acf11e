"""API keys at both servers: who is let in, what is open to all, reading the file again."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_script import ScriptedService
from gateway_servers import ALICE, BOB, GatewayServers, key_file, open_servers

from outrider.gateway.admission import auth
from outrider.gateway.admission.auth import caller_of, owner_of
from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.types import ValidRequest
from outrider.shared import api_keys, rpc
from outrider.shared.api_keys import KeyRing, key_line
from outrider.shared.errors import ConfigError, Unauthenticated
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc

HELLO = {"prompt": "Hello", "max_tokens": 5}
WRONG_HEADERS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": ALICE},
    {"authorization": f"Basic {ALICE}"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer or-nobody"},
    {"authorization": f"Bearer {ALICE}x"},
    {"authorization": f"Bearer {ALICE} {BOB}"},
    {"x-api-key": ALICE},
]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return key_file(tmp_path)


@pytest.fixture
async def servers(service: ScriptedService, keys: str) -> AsyncIterator[GatewayServers]:
    async with open_servers(service, GatewayConfig(port=0, grpc_port=0, api_keys_file=keys)) as opened:
        yield opened


@pytest.fixture
async def http(servers: GatewayServers) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=servers.url) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- REST -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", WRONG_HEADERS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/nothing"])
async def test_rest_asks_for_a_key(
    http: httpx.AsyncClient, service: ScriptedService, path: str, headers: dict[str, str]
) -> None:
    response = await http.post(path, json=HELLO, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", 401, None)
    assert ALICE not in response.text
    assert "or-nobody" not in response.text
    assert service.num_opened == 0


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load", "/openapi.json", "/docs", "/v1/streams/x"])
async def test_rest_asks_for_a_key_to_look_around(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_rest_lets_a_key_in(http: httpx.AsyncClient, scheme: str) -> None:
    response = await http.post("/v1/completions", json=HELLO, headers={"authorization": f"{scheme} {BOB}"})
    assert response.status_code == 200
    assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 200


async def test_the_refusal_does_not_wait_for_the_body(servers: GatewayServers) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", servers.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/readyz", "/metrics"])
async def test_what_is_open_to_all(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200


async def test_metrics_can_be_protected(service: ScriptedService, keys: str) -> None:
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=keys, protect_metrics=True)
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers=bearer(ALICE))).status_code == 200
        for path in ("/health", "/ping", "/ready", "/readyz"):
            assert (await http.get(path)).status_code == 200


async def test_without_a_file_nobody_is_asked(service: ScriptedService) -> None:
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers,
        httpx.AsyncClient(base_url=servers.url) as http,
        rpc.open_channel(servers.grpc_address) as channel,
    ):
        assert (await http.post("/v1/completions", json=HELLO)).status_code == 200
        stub: Any = pb_grpc.GatewayStub(channel)
        assert [reply async for reply in stub.Generate(pb.GenerateRequest(prompt="x"))]


# ---- gRPC -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", WRONG_HEADERS)
@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Generate", pb.GenerateRequest(prompt="x")),
        ("Resume", pb.ResumeRequest(request_id="x")),
        ("GetModel", pb.GetModelRequest()),
    ],
)
async def test_grpc_asks_for_a_key(
    servers: GatewayServers, service: ScriptedService, method: str, request_: Any, headers: dict[str, str]
) -> None:
    async with rpc.open_channel(servers.grpc_address) as channel:
        call = getattr(pb_grpc.GatewayStub(channel), method)(request_, metadata=tuple(headers.items()))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, await call.details()
        assert "key" in (await call.details() or "")
    assert service.num_opened == 0


async def test_grpc_lets_a_key_in_and_health_needs_none(servers: GatewayServers, service: ScriptedService) -> None:
    async with rpc.open_channel(servers.grpc_address) as channel:
        stub: Any = pb_grpc.GatewayStub(channel)
        metadata = tuple(bearer(BOB).items())
        replies = [reply async for reply in stub.Generate(pb.GenerateRequest(prompt="x"), metadata=metadata)]
        assert replies[-1].finish_reason
        assert (await stub.GetModel(pb.GetModelRequest(), metadata=metadata)).model == "demo"
        assert await rpc.is_serving(channel, 3)


async def test_broken_protobuf_is_the_callers_fault(servers: GatewayServers) -> None:
    async with rpc.open_channel(servers.grpc_address) as channel:
        call: Any = channel.unary_stream("/outrider.v1.Gateway/Generate")
        call = call(b"\xff\xff\xff", metadata=tuple(bearer(BOB).items()))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "protobuf" in (await call.details() or "")


# ---- the owner --------------------------------------------------------------------------------------------------


@dataclass
class SeenOwner:
    owner: str = "nobody asked"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SeenOwner:
    """What owner_of says of the requests that come to the code behind the servers."""
    found = SeenOwner()

    def watched(request_or_context: Any) -> auth.Caller:
        found.owner = owner_of(request_or_context)
        return caller_of(request_or_context)

    monkeypatch.setattr("outrider.gateway.servers.http.generations.caller_of", watched)
    monkeypatch.setattr("outrider.gateway.servers.grpc_server.caller_of", watched)
    return found


async def test_the_owner_reaches_both_doors_code(
    http: httpx.AsyncClient, servers: GatewayServers, service: ScriptedService, seen: SeenOwner
) -> None:
    await http.post("/v1/completions", json=HELLO, headers=bearer(ALICE))
    assert seen.owner == "alice"
    async with rpc.open_channel(servers.grpc_address) as channel:
        stub: Any = pb_grpc.GatewayStub(channel)
        async for _ in stub.Generate(pb.GenerateRequest(prompt="x"), metadata=tuple(bearer(BOB).items())):
            pass
    assert seen.owner == "bob"
    requests: list[ValidRequest] = service.requests
    assert len(requests) == 2


async def test_nobody_owns_what_came_through_no_server() -> None:
    assert owner_of(object()) == ""


# ---- the ring ---------------------------------------------------------------------------------------------------


def test_a_ring_needs_a_good_file(tmp_path: Path) -> None:
    for content in (b"", b"alice", b"\xff\xfe"):
        path = tmp_path / "keys"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="--api-keys-file"):
            KeyRing(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(str(tmp_path))


def test_every_entry_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key found must not end the search: that would tell its place."""
    names = [f"key{number}" for number in range(9)]
    ring = KeyRing(key_file(tmp_path, *(key_line(name, f"or-{name}") for name in names)))
    compared: list[bytes] = []

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return hmac.compare_digest(left, right)

    class Watched:
        compare_digest = staticmethod(counting)

    monkeypatch.setattr(api_keys, "hmac", Watched)
    assert ring.find("Bearer or-key0").name == "key0"
    assert len(set(compared)) == 9
    with pytest.raises(Unauthenticated):
        ring.find("Bearer or-key9")
    assert len(compared) == 18


def test_reading_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(key_file(tmp_path))
    ring = KeyRing(str(path))
    path.write_text(key_line("carol", "or-carol"))
    assert ring.find(f"Bearer {ALICE}").name == "alice"
    ring.reload()
    assert ring.find("Bearer or-carol").name == "carol"
    with pytest.raises(Unauthenticated):
        ring.find(f"Bearer {ALICE}")


@pytest.mark.parametrize("broken", [None, b"", b"carol:", b"# nobody", b"\xff"])
def test_a_broken_file_locks_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: bytes | None) -> None:
    path = Path(key_file(tmp_path))
    ring = KeyRing(str(path))
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken)
    ring.reload()
    assert ring.find(f"Bearer {ALICE}").name == "alice"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the API keys are unchanged" in record.getMessage()
