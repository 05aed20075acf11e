"""OpenAI's `prediction`: what travels with the request, what is refused, and what the usage says of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService
from hermes_service import service_of

from outrider.gateway.request.record import SessionRecord, new_record
from outrider.gateway.servers.http.app import create_app

FILE = "def area(shape):\n    return shape.width * shape.height\n\n\nprint(area(shape))\n"
EDITED = FILE.replace("area", "size")
TEXT = {"type": "content", "content": FILE}
PARTS = {"type": "content", "content": [{"type": "text", "text": FILE[:20]}, {"type": "text", "text": FILE[20:]}]}
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Rename it."}]},
    RESPONSES: {"input": "Rename it.", "store": False},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1000},
}


@pytest.fixture
def service() -> ScriptedService:
    return service_of(EDITED, reasoning_parser="none", tool_call_parser="none")


async def post(service: ScriptedService, path: str, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json={**BODIES[path], **body})


def details_of(usage: dict[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    return details


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("prediction", [TEXT, PARTS], ids=["text", "parts"])
async def test_it_travels_with_the_request(service: ScriptedService, path: str, prediction: dict[str, Any]) -> None:
    response = await post(service, path, prediction=prediction)
    assert response.status_code == 200, response.text
    expected = tuple(service.tokenizer.encode(FILE, add_special_tokens=False))
    assert service.requests[0].predicted_token_ids == expected
    ((kind, prepared),) = service.begun.values()
    assert (
        SessionRecord.decode(new_record(kind, prepared).encode()).prepared.requests[0].predicted_token_ids == expected
    )
    details = details_of(response.json()["usage"])
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == len(expected)
    assert 0.5 < details["accepted_prediction_tokens"] / len(expected) < 1


async def test_the_usage_does_not_depend_on_the_rounds(service: ScriptedService) -> None:
    found = set()
    for commit_len in (1, 3, 1000):
        service.script = Script(EDITED, commit_len)
        streamed = await post(service, CHAT, prediction=TEXT, stream=True, stream_options={"include_usage": True})
        *_, last, _done = [event.split("data: ")[1] for event in streamed.text.removesuffix("\n\n").split("\n\n")]
        whole = (await post(service, CHAT, prediction=TEXT)).json()
        found |= {json.dumps(details_of(json.loads(last)["usage"])), json.dumps(details_of(whole["usage"]))}
    assert len(found) == 1


async def test_the_usage_of_right_wrong_and_no_predictions(service: ScriptedService) -> None:
    right = details_of((await post(service, CHAT, prediction={"type": "content", "content": EDITED})).json()["usage"])
    assert right["rejected_prediction_tokens"] == 0
    wrong = details_of((await post(service, CHAT, prediction={"type": "content", "content": "#" * 50})).json()["usage"])
    assert wrong["accepted_prediction_tokens"] == 0
    two = details_of((await post(service, CHAT, prediction=TEXT, n=2)).json()["usage"])
    one = details_of((await post(service, CHAT, prediction=TEXT)).json()["usage"])
    assert sum(two.values()) == 2 * sum(one.values())
    for nothing in (None, {"type": "content", "content": ""}):
        assert "completion_tokens_details" not in (await post(service, CHAT, prediction=nothing)).json()["usage"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "outline", "content": "x"}, "prediction.type", "prediction.type must be content"),
    ({"type": "content"}, "prediction.content", "prediction.content is required"),
    ({"type": "content", "content": 5}, "prediction.content", "must be text or a list of text parts, got a number"),
    (
        {"type": "content", "content": [{"type": "image_url"}]},
        "prediction.content",
        "part 0 has type 'image_url'; only text is supported",
    ),
    ({"type": "content", "content": "a" * 100_000}, "prediction", "prediction has 100000 characters"),
    ({"type": "content", "content": "a " * 3000}, "prediction", "entries for each of 128 outputs"),
]


@pytest.mark.parametrize(("prediction", "param", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
async def test_refusals(service: ScriptedService, prediction: dict[str, Any], param: str, message: str) -> None:
    response = await post(service, CHAT, prediction=prediction, n=128)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
