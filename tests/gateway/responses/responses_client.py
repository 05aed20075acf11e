"""What the tests of /v1/responses share: a gateway in this process whose model says a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from gateway_script import ScriptedService

from outrider.gateway.admission.auth import Admission
from outrider.gateway.servers.http.app import create_app
from outrider.shared.log.patient_redis import Command, PatientRedis

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS},
    {"type": "function", "name": "now"},
]
CALLS = (
    "<think>\nTwo <b>calls</b>.\n</think>\n\nSure, 漢字.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    'And:\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


class CountedRedis(PatientRedis):
    """Counts the commands that were asked for."""

    num_commands = 0

    async def call(self, command: Command) -> Any:
        self.num_commands += 1
        return await super().call(command)


async def post(service: ScriptedService, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        whole = {"input": "Weather?", "tools": TOOLS, "request_id": "r", **body}
        return await client.post("/v1/responses", json=whole, headers=headers)


@asynccontextmanager
async def openai_client(
    service: ScriptedService, api_key: str = "none", admission: Admission | None = None
) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=create_app(service, admission=admission))
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key=api_key, http_client=http, max_retries=0)


async def answer(service: ScriptedService, **body: Any) -> dict[str, Any]:
    response = await post(service, **body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def blocks_of(response: httpx.Response) -> list[str]:
    return [block for block in response.text.split("\n\n") if block and not block.startswith(":")]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Each event's data, which must be of the type that its first line says."""
    events = []
    for block in blocks_of(response):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append(json.loads(lines["data"]))
        assert lines["event"] == events[-1]["type"]
    return events
