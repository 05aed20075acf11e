"""The worker under Dynamo's own frontend; skipped where ai-dynamo is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.plugins.dynamo.dynamo_fleet import MODEL, DynamoFleet
from tests.plugins.dynamo.storm import Storm, body_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo is not installed here"),
]

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def main():", "max_tokens": 24, "temperature": 1, "seed": 7}


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DynamoFleet]:
    async with DynamoFleet(tmp_path_factory.mktemp("dynamo")) as running:
        await running.wait_ready()
        yield running


@pytest.fixture(scope="module")
async def dynamo(fleet: DynamoFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.frontend_url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
async def gateway(fleet: DynamoFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=300) as client:
        yield client


async def completed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 40},
        {"prompt": ["def main():", "import os"]},
        {"stop": ["main"]},
        {"logprobs": 2},
    ],
)
async def test_dynamo_says_what_the_gateway_says(
    dynamo: httpx.AsyncClient, gateway: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    through, direct = await completed(dynamo, **fields), await completed(gateway, **{**fields, "model": "demo-target"})
    for one, other in zip(through["choices"], direct["choices"], strict=True):
        assert one["text"] == other["text"]
        assert one["finish_reason"] == other["finish_reason"]
        if fields.get("logprobs"):
            assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], rel=1e-6)
    assert through["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]


async def test_grammars_and_forced_calls(fleet: DynamoFleet, dynamo: httpx.AsyncClient) -> None:
    text = (await completed(dynamo, guided_regex="[ab]{5}"))["choices"][0]["text"]
    assert re.fullmatch("[ab]{5}", text)
    client = Storm(fleet, num_kills=0)
    async with client.client:
        _text, calls, _finish = json.loads(await client.answer(body_of(3), str(uuid.uuid4())))
    name, arguments = calls["0"]
    assert name == "move"
    assert re.match(r'\{\s*"steps":\s*\[', arguments)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"n": 2}, "n above 1"), ({"guided_json": {"type": "foo"}}, "Invalid type"), ({"prompt": "x " * 2500}, "")],
)
async def test_what_is_refused_is_the_client_s_fault_and_no_worker_s(
    dynamo: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    answer = await dynamo.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 400
    assert named in answer.text
    await completed(dynamo)


async def test_a_client_that_leaves_frees_its_session(fleet: DynamoFleet, dynamo: httpx.AsyncClient) -> None:
    [verifier] = fleet.of_kind("verifier")
    long = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with dynamo.stream("POST", "/v1/completions", json=long) as stream:
        await anext(stream.aiter_lines())
        assert (await fleet.verifier_info(verifier)).num_sessions == 1
    async with asyncio.timeout(60):
        while (await fleet.verifier_info(verifier)).num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.storm
async def test_no_text_changes_when_workers_gateways_and_verifiers_die(fleet: DynamoFleet) -> None:
    report = await Storm(fleet, num_kills=7, num_requests=10).run()
    assert report.different == []
    assert report.failed == []
    assert report.kills == {"worker": 3, "gateway": 3, "verifier": 1}
    assert report.num_struck >= 7
    assert report.num_migrations > 0
