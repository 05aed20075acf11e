"""Receipts that the published clients get by /v1/responses and /v1/messages, whole and streamed, checked elsewhere."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from e2e_stack import DEMO_TARGET, RunningStack

from outrider.gateway.answers.read import read_answer
from outrider.gateway.servers.http.receipts import NUM_AHEAD
from outrider.offline.verify import ReceiptVerifier

OPEN_FILE: dict[str, Any] = {
    "type": "object",
    "properties": {"mode": {"enum": ["r", "w"]}, "line": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mode", "line"],
    "additionalProperties": False,
}
# Outrider's own fields of a request. A schema is asked for in place of tool calls, which this stack does not parse.
OURS = {"receipt": True, "speculation": {"method": "draft_model"}}
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.0}}
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def verifier() -> Iterator[ReceiptVerifier]:
    with ReceiptVerifier(DEMO_TARGET, use_tqdm_on_load=False) as opened:
        yield opened


def _responses(stack: RunningStack, *, stream: bool, schema: bool = False, **fields: Any) -> dict[str, Any]:
    """The answer as the openai package read it."""
    text = {"format": {"type": "json_schema", "name": "file", "schema": OPEN_FILE}}
    body = {
        "model": "demo-target",
        "input": "Hello.",
        "max_output_tokens": 60,
        **fields,
        **({"text": text} if schema else {}),
    }
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        given = {**OURS, "seed": 5}
        if not stream:
            return client.responses.create(**body, extra_body=given).to_dict()
        events = [event.to_dict() for event in client.responses.create(**body, stream=True, extra_body=given)]
    return _of_events(events)


def _messages(stack: RunningStack, *, stream: bool, schema: bool = False, **fields: Any) -> dict[str, Any]:
    """The answer as the anthropic package read it."""
    body: dict[str, Any] = {
        "model": "demo-target",
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "Hello."}],
        "extra_body": {**OURS, "seed": 5, **fields, **({"output_config": _FORMAT} if schema else {})},
    }
    with anthropic.Anthropic(base_url=stack.url, api_key="none", timeout=120, max_retries=0) as client:
        if not stream:
            return client.messages.create(**body).to_dict()
        events = [event.to_dict() for event in client.messages.create(**body, stream=True)]
    return _of_events(events)


_FORMAT = {"format": {"type": "json_schema", "schema": OPEN_FILE}}
APIS = {"responses": _responses, "messages": _messages}


def _of_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    return read_answer("".join(f"data: {json.dumps(event)}\n\n" for event in events), "the events")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", APIS)
def test_an_answer_is_confirmed_and_no_changed_token_is(
    stack: RunningStack, verifier: ReceiptVerifier, api: str, kind: str, stream: bool
) -> None:
    answer = APIS[api](stack, stream=stream, **KINDS[kind])
    (token_ids,) = answer["receipt"]["token_ids"]
    assert _at_the_fleet(stack, answer) == f"confirmed: all {len(token_ids)} tokens"
    assert verifier.verify(answer).conclusion == f"confirmed: all {len(token_ids)} tokens"
    assert len(token_ids) > 20
    for place in range(0, len(token_ids), 7):
        changed = copy.deepcopy(answer)
        changed["receipt"]["token_ids"][0][place] ^= 1
        wrong = verifier.verify(changed).conclusion
        assert f"token {place} of choice 0 is" in wrong
        assert _at_the_fleet(stack, changed) == wrong


def _at_the_fleet(stack: RunningStack, answer: dict[str, Any]) -> str:
    """The verdict of the fleet's own verifier."""
    reply = httpx.post(f"{stack.url}/v1/receipts/verify", json=answer, timeout=120)
    assert reply.status_code == 200, reply.text
    said: str = reply.json()["said"]
    return said


def test_the_fleet_checks_an_answer_in_few_forwards(stack: RunningStack) -> None:
    answer = _responses(stack, stream=False, temperature=0, max_output_tokens=128)
    (token_ids,) = answer["receipt"]["token_ids"]
    before = _num_rounds(stack)
    assert _at_the_fleet(stack, answer) == f"confirmed: all {len(token_ids)} tokens"
    assert _num_rounds(stack) - before <= len(token_ids) / (1 + NUM_AHEAD) + 3


def _num_rounds(stack: RunningStack) -> float:
    return sum(stack.metric("outrider:round_seconds_count", speculation=kind) for kind in ("on", "off"))


@pytest.mark.parametrize("api", APIS)
def test_an_answer_held_by_a_schema_is_confirmed(stack: RunningStack, verifier: ReceiptVerifier, api: str) -> None:
    for stream in (False, True):
        found = verifier.verify(APIS[api](stack, stream=stream, schema=True, temperature=1.0))
        assert found.exit_code == 0, found.conclusion


def _reword(answer: dict[str, Any]) -> None:
    answer["output"][0]["content"][0]["text"] += "!"


def _say_complete(answer: dict[str, Any]) -> None:
    answer["status"], answer["incomplete_details"] = "completed", None


def _add_item(answer: dict[str, Any]) -> None:
    answer["output"].append(answer["output"][0])


def _reword_message(answer: dict[str, Any]) -> None:
    answer["content"][0]["text"] += "!"


def _say_ended(answer: dict[str, Any]) -> None:
    answer["stop_reason"] = "end_turn"


@pytest.mark.parametrize(
    ("api", "change", "wrong"),
    [
        ("responses", _reword, "its tokens make another output"),
        ("responses", _add_item, "its tokens make another output"),
        ("responses", _say_complete, "its tokens make another status"),
        ("messages", _reword_message, "its tokens make another content"),
        ("messages", _say_ended, "its tokens make another stop_reason"),
    ],
)
def test_what_is_made_of_the_tokens_is_compared(
    stack: RunningStack, verifier: ReceiptVerifier, api: str, change: Change, wrong: str
) -> None:
    answer = APIS[api](stack, stream=False, temperature=0)
    change(answer)
    assert verifier.verify(answer).wrong == wrong


@pytest.mark.parametrize("api", APIS)
def test_a_stream_without_an_event_or_with_another_text_is_not_confirmed(
    stack: RunningStack, verifier: ReceiptVerifier, api: str
) -> None:
    answer = APIS[api](stack, stream=True, temperature=0)
    events = answer["events"]
    place = next(place for place, event in enumerate(events) if event["type"].endswith("delta"))
    shorter = {**answer, "events": [*events[:place], *events[place + 1 :]]}
    assert verifier.verify(shorter).wrong == f"the answer has not the {len(events)} events of its receipt"
    changed = copy.deepcopy(answer)
    changed["events"][place]["delta"] = "other"
    assert verifier.verify(changed).wrong == f"event {place}: its tokens make another delta"
