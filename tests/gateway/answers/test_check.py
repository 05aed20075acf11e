"""Answers of every API, whole and streamed, are compared with what the tokens of their receipts make. The model is a
script; that tokens are drawn as before is tested with real ones (tests/e2e/apis/test_receipts.py and its neighbour).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService

from outrider.gateway.answers.check import Form, other_part, redrawn
from outrider.gateway.answers.read import read_answer
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.request.answers import AnswerKind

EXACT = {"temperature": 1.0, "receipt": True, "speculation": {"mode": "exact", "method": "ngram"}}
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[str, dict[str, Any], AnswerKind]] = {
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 40}, AnswerKind.COMPLETION),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40, "n": 2}, AnswerKind.CHAT),
    "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 40}, AnswerKind.RESPONSE),
    "cut response": ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, AnswerKind.RESPONSE),
    "message": ("/v1/messages", {"messages": USER, "max_tokens": 40}, AnswerKind.MESSAGE),
    "stopped message": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 40, "stop_sequences": ["漢"]},
        AnswerKind.MESSAGE,
    ),
}


async def answered(http: httpx.AsyncClient, name: str, *, stream: bool) -> dict[str, Any]:
    path, body, _ = BODIES[name]
    reply = await http.post(path, json={**body, **EXACT, "stream": stream})
    assert reply.status_code == 200, reply.text
    return read_answer(reply.text, "the answer")


async def found(service: ScriptedService, answer: dict[str, Any]) -> str:
    async def compare(made: Callable[[], Any]) -> str:
        return other_part(made(), answer)

    receipt = Receipt.parse(answer["receipt"])
    return (await redrawn(receipt, Form.of(answer), compare, service.generate, service.tokenizer)).conclusion


def texts(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in an answer texts stand that its tokens make."""
    if isinstance(part, dict):
        return [place for name, value in part.items() for place in texts(value, (*path, name))]
    if isinstance(part, list):
        return [place for index, value in enumerate(part) for place in texts(value, (*path, index))]
    named = {"text", "delta", "content", "thinking"}
    return [path] if isinstance(part, str) and part and path[-1] in named else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_is_confirmed_and_none_with_another_text(
    http: httpx.AsyncClient, service: ScriptedService, name: str, stream: bool
) -> None:
    answer = await answered(http, name, stream=stream)
    assert Receipt.parse(answer["receipt"]).record.kind is BODIES[name][2]
    num_tokens = sum(map(len, answer["receipt"]["token_ids"]))
    assert await found(service, answer) == f"confirmed: all {num_tokens} tokens"
    assert await found(service, {"receipt": answer["receipt"]}) == f"confirmed: all {num_tokens} tokens"
    changes = [place for place in texts(answer) if place[0] != "receipt"]
    assert changes
    for place in changes:
        changed = copy.deepcopy(answer)
        part: Any = changed
        for step in place[:-1]:
            part = part[step]
        part[place[-1]] += "x"
        assert "its tokens make another" in await found(service, changed), place


@pytest.mark.parametrize("name", ["response", "message"])
async def test_a_stream_of_other_events_is_not_confirmed(
    http: httpx.AsyncClient, service: ScriptedService, name: str
) -> None:
    answer = await answered(http, name, stream=True)
    events = answer["events"]
    for other in ([*events[:2], *events[3:]], [*events, events[-1]], [events[1], events[0], *events[2:]], None, 1):
        assert (await found(service, {**answer, "events": other})).startswith("not confirmed: ")


async def test_a_request_that_is_drawn_again_has_an_id_of_its_own(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    """Its own may be in use: a session of that id would be another's."""
    answer = await answered(http, "chat", stream=False)
    before = {request.request_id for request in service.requests}
    service.requests.clear()
    await found(service, answer)
    ids = [request.request_id for request in service.requests]
    assert len(set(ids)) == 2
    assert not before.intersection(ids)


async def test_the_first_other_token_is_named(http: httpx.AsyncClient, service: ScriptedService) -> None:
    answer = await answered(http, "message", stream=False)
    token_ids = answer["receipt"]["token_ids"][0]
    for place in (0, 3, len(token_ids) - 1):
        changed = copy.deepcopy(answer)
        changed["receipt"]["token_ids"][0][place] ^= 1
        assert f"token {place} of choice 0 is" in await found(service, changed)
        assert service.num_open == 0
    changed = copy.deepcopy(answer)
    changed["receipt"]["token_ids"][0].append(5)
    assert await found(service, changed) == f"not confirmed: choice 0 ends after {len(token_ids)} tokens"


async def test_a_stored_conversation_is_not_in_the_receipt(http: httpx.AsyncClient, service: ScriptedService) -> None:
    answer = await answered(http, "response", stream=False)
    plan = Receipt.parse(answer["receipt"]).record.prepared.options.response
    assert plan is not None
    assert plan.input_items == ""
