"""What guards the Messages routes, behind real sockets: keys, quotas, time limits and sizes, in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService
from gateway_servers import ALICE, BOB, key_file, open_servers

from outrider.gateway.config import GatewayConfig
from outrider.shared.api_keys import key_line

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}


@asynccontextmanager
async def messages_client(service: ScriptedService, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0, **settings)) as servers,
        httpx.AsyncClient(base_url=servers.url, timeout=60) as http,
    ):
        yield http


def error_type(response: httpx.Response) -> str:
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["error"].keys() == {"type", "message"}
    kind: str = body["error"]["type"]
    return kind


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_a_key_comes_in_either_header(service: ScriptedService, tmp_path: Path, path: str) -> None:
    async with messages_client(service, api_keys_file=key_file(tmp_path)) as http:
        for right in ({"x-api-key": ALICE}, {"authorization": f"Bearer {BOB}"}):
            assert (await http.post(path, json=BODY, headers=right)).status_code == 200
        for wrong in ({}, {"x-api-key": "or-nobody"}, {"authorization": "Bearer or-nobody", "x-api-key": ALICE}):
            refused = await http.post(path, json=BODY, headers=wrong)
            assert (refused.status_code, error_type(refused)) == (401, "authentication_error")
    owners = {prepared.requests[0].owner for _, prepared in service.begun.values()}
    assert owners == ({"alice", "bob"} if path == MESSAGES else set())


async def test_tokens_are_charged_to_the_key(service: ScriptedService, tmp_path: Path) -> None:
    keys = key_file(tmp_path, key_line("alice", ALICE, tokens_per_minute=40))
    async with messages_client(service, api_keys_file=keys) as http:
        assert (await http.post(MESSAGES, json=BODY, headers={"x-api-key": ALICE})).status_code == 200
        refused = await http.post(MESSAGES, json=BODY, headers={"x-api-key": ALICE})
    assert (refused.status_code, error_type(refused)) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_that_takes_too_long(service: ScriptedService, stream: bool) -> None:
    service.script = Script(endless=True)
    async with messages_client(service) as http:
        response = await http.post(MESSAGES, json={**BODY, "stream": stream}, headers={"x-request-timeout": "2.5"})
    assert service.num_open == 0
    if not stream:
        assert (response.status_code, error_type(response)) == (504, "timeout_error")
        return
    lines = response.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert lines[-2] == "event: error"  # behind comments, as the stream waited
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"


async def test_a_body_over_the_limit(service: ScriptedService) -> None:
    async with messages_client(service) as http:
        response = await http.post(MESSAGES, json={**BODY, "system": "a" * 10_000_000})
    assert (response.status_code, error_type(response)) == (413, "request_too_large")
