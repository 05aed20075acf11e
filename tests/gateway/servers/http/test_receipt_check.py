"""POST /v1/receipts/verify over a script: verdicts, refusals by name, a client that leaves. Real models: tests/e2e."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import random
from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.gateway.admission.auth import Caller, put_caller
from outrider.gateway.fleet.view import FleetView, VerifierView
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.http.app import create_app
from tests.gateway.asgi_call import AsgiCall

HERE, OTHER = "bfloat16/cpu/cpu/tp1/aa", "float32/cpu/cpu/tp1/bb"
BODY = {
    "prompt": "Hello",
    "max_tokens": 12,
    "temperature": 1.0,
    "receipt": True,
    "speculation": {"mode": "exact", "method": "ngram"},
}


async def answered(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await http.post("/v1/completions", json={**BODY, **fields})).json()
    return answer


def of_kind(answer: dict[str, Any], numerics: str) -> dict[str, Any]:
    receipt = Receipt.parse(answer["receipt"])
    record = dataclasses.replace(receipt.record, numerics=numerics)
    return {**answer, "receipt": dict(dataclasses.replace(receipt, record=record).body())}


def of_tokenizer(answer: dict[str, Any], digest: str) -> dict[str, Any]:
    receipt = Receipt.parse(answer["receipt"])
    prepared = receipt.record.prepared
    prepared = dataclasses.replace(prepared, options=dataclasses.replace(prepared.options, tokenizer=digest))
    record = dataclasses.replace(receipt.record, prepared=prepared)
    return {**answer, "receipt": dict(dataclasses.replace(receipt, record=record).body())}


def with_params(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    receipt = Receipt.parse(answer["receipt"])
    (request,) = receipt.record.prepared.requests
    params = dataclasses.replace(request.sampling_params, **changes)
    prepared = dataclasses.replace(
        receipt.record.prepared, requests=(dataclasses.replace(request, sampling_params=params),)
    )
    record = dataclasses.replace(receipt.record, prepared=prepared)
    return {**answer, "receipt": dict(dataclasses.replace(receipt, record=record).body())}


async def test_a_verdict_names_the_first_token_that_differs(http: httpx.AsyncClient) -> None:
    answer = await answered(http)
    num_tokens = len(answer["receipt"]["token_ids"][0])
    reply = await http.post("/v1/receipts/verify", json=answer)
    assert reply.status_code == 200
    assert reply.json() == {"confirmed": True, "num_tokens": num_tokens, "said": f"confirmed: all {num_tokens} tokens"}
    alone = await http.post("/v1/receipts/verify", json={"receipt": answer["receipt"]})
    assert alone.json() == reply.json()
    changed = copy.deepcopy(answer)
    changed["receipt"]["token_ids"][0][4] ^= 1
    found = (await http.post("/v1/receipts/verify", json=changed)).json()
    assert not found["confirmed"]
    assert found["num_tokens"] == 4
    assert "token 4 of choice 0 is" in found["said"]


@pytest.mark.parametrize("body", [[], {}, {"receipt": None}, {"receipt": {"version": 1}}, "text"])
async def test_what_is_no_receipt_is_refused(http: httpx.AsyncClient, body: Any) -> None:
    reply = await http.post("/v1/receipts/verify", json=body)
    assert reply.status_code == 400
    assert "receipt" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 4096}, {"logit_bias": ((5000, 1.0),)}, {"num_logprobs": -1}, {"temperature": -1.0}]
)
async def test_a_receipt_is_checked_as_a_request_is(
    http: httpx.AsyncClient, service: ScriptedService, changes: dict[str, Any]
) -> None:
    answer = with_params(await answered(http), **changes)
    service.requests.clear()
    reply = await http.post("/v1/receipts/verify", json=answer)
    assert reply.status_code == 400, reply.text
    assert not service.requests


async def test_spoilt_receipts_end_in_a_verdict_or_a_refusal(http: httpx.AsyncClient) -> None:
    rng = random.Random(5)
    answers = [await answered(http)]
    for path, fields in (
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ):
        given = {name: value for name, value in BODY.items() if name not in ("prompt", "max_tokens")}
        answers.append((await http.post(path, json={**given, **fields})).json())
    for answer in answers:
        for _ in range(100):
            data = bytearray(base64.b64decode(answer["receipt"]["request"]))
            for _ in range(rng.choice((1, 1, 3))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            receipt = {**answer["receipt"], "request": base64.b64encode(bytes(data)).decode()}
            reply = await http.post("/v1/receipts/verify", json={**answer, "receipt": receipt})
            assert reply.status_code in (200, 400), reply.text


class MixedService(ScriptedService):
    """With verifiers of these kinds."""

    kinds: tuple[str, ...] = ()

    def fleet(self) -> FleetView:
        members: list[Any] = [{"healthy": True, "numerics": kind} for kind in self.kinds]
        verifiers: list[VerifierView] = members
        return {**super().fleet(), "verifiers": verifiers}


@pytest.fixture
def service(tokenizer: Any) -> MixedService:
    return MixedService(tokenizer)


async def test_other_numerics_are_refused_by_name(http: httpx.AsyncClient, service: MixedService) -> None:
    answer = of_kind(await answered(http), OTHER)
    service.requests.clear()
    service.kinds = (HERE,)
    reply = await http.post("/v1/receipts/verify", json=answer)
    assert reply.status_code == 400
    assert OTHER in reply.json()["error"]["message"]
    assert HERE in reply.json()["error"]["message"]
    assert not service.requests
    service.kinds = (HERE, OTHER)
    assert (await http.post("/v1/receipts/verify", json=answer)).json()["confirmed"]
    (request,) = service.requests
    assert [start.numerics for start in request.starts] == [OTHER]


async def test_another_tokenizer_is_refused_by_name(
    http: httpx.AsyncClient, service: ScriptedService, tokenizer: Tokenizer
) -> None:
    answer = await answered(http)
    assert answer["receipt"]["tokenizer"] == tokenizer.digest
    service.requests.clear()
    reply = await http.post("/v1/receipts/verify", json=of_tokenizer(answer, "0123456789abcdef"))
    assert reply.status_code == 400
    assert "0123456789abcdef" in reply.json()["error"]["message"]
    assert tokenizer.digest in reply.json()["error"]["message"]
    assert not service.requests
    unsaid = of_tokenizer(answer, "")  # of a gateway before receipts said it
    assert (await http.post("/v1/receipts/verify", json=unsaid)).json()["confirmed"]


def called_by(owner: str, app: ASGIApp) -> ASGIApp:
    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        put_caller(scope, Caller(owner))
        await app(scope, receive, send)

    return called


async def test_receipts_of_one_caller_are_drawn_one_at_a_time(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    answer = await answered(http)
    service.script.delay_s = 3600.0
    app = create_app(service)
    calls = [AsgiCall(called_by("one", app), "/v1/receipts/verify", answer) for _ in range(3)]
    for call in calls:
        call.start()
    while not service.num_open:  # noqa: ASYNC110 only asking tells
        await asyncio.sleep(0.001)
    service.script.delay_s = 0.0
    other = httpx.ASGITransport(app=called_by("other", app))
    async with httpx.AsyncClient(transport=other, base_url="http://test") as neighbour:
        assert (await neighbour.post("/v1/receipts/verify", json=answer)).json()["confirmed"]
    assert service.num_open == 1
    for call in calls:
        call.hang_up()
    await asyncio.gather(*(call.task for call in calls if call.task is not None), return_exceptions=True)
    assert service.num_open == 0


async def test_the_work_ends_when_the_client_leaves(http: httpx.AsyncClient, service: MixedService) -> None:
    answer = await answered(http)
    service.script.delay_s = 3600.0
    call = AsgiCall(create_app(service), "/v1/receipts/verify", answer)
    call.start()
    while not service.num_open:  # noqa: ASYNC110 only asking tells
        await asyncio.sleep(0.001)
    call.hang_up()
    assert call.task is not None
    await asyncio.gather(call.task, return_exceptions=True)
    assert service.num_open == 0
