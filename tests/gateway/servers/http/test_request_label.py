"""X-Request-Id is a label: any value, any number of times, and every answer has it; the id of a request is another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService
from gateway_servers import key_file, open_servers

from outrider.gateway.config import GatewayConfig
from outrider.shared.errors import Unavailable

COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_label_on_two_requests(http: httpx.AsyncClient, service: ScriptedService, stream: bool) -> None:
    headers = {"x-request-id": "proxy-7"}
    answers = [await http.post(COMPLETIONS, json={**HELLO, "stream": stream}, headers=headers) for _ in range(2)]
    assert [(one.status_code, one.headers["x-request-id"]) for one in answers] == [(200, "proxy-7")] * 2
    first, second = service.requests
    assert first.request_id != second.request_id
    assert "proxy-7" not in first.request_id


@pytest.mark.parametrize("label", [b"two words", "grün".encode(), b"\xff", b"x" * 4000, b"cmpl-r:3"])
async def test_any_label_is_repeated_as_it_came(service: ScriptedService, label: bytes) -> None:
    async with open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers, httpx.AsyncClient() as client:
        answer = await client.post(servers.url + COMPLETIONS, json=HELLO, headers=[(b"x-request-id", label)])
    assert answer.status_code == 200
    assert [value for name, value in answer.headers.raw if name.lower() == b"x-request-id"] == [label]


async def test_refusals_have_the_label(service: ScriptedService, tmp_path: Path) -> None:
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(tmp_path))
    async with open_servers(service, config) as servers, httpx.AsyncClient() as client:
        refused = await client.post(servers.url + COMPLETIONS, json=HELLO, headers={"x-request-id": "proxy-8"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "proxy-8")


async def test_without_a_label_the_header_is_the_answers_id(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETIONS, json={**HELLO, "request_id": "mine"})
    assert answer.headers["x-request-id"] == answer.json()["id"] == "cmpl-mine"


async def test_the_log_has_the_label_of_a_failure(
    http: httpx.AsyncClient, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = Script(error=Unavailable("no verifier is there"))
    with caplog.at_level(logging.WARNING):
        await http.post(COMPLETIONS, json=HELLO, headers={"x-request-id": "proxy-9\t"})
    assert f"POST {COMPLETIONS} answered 503, x-request-id 'proxy-9" in caplog.text
