"""Streams of /v1/responses: OpenAI's events in OpenAI's order, the same at every commit size and after every resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hermes_service import service_of
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from responses_client import CALLS, TOOLS, blocks_of, events_of, openai_client, post

from outrider.gateway.request.record import SessionRecord, new_record
from outrider.shared.errors import VerifierLost

SIZES = [1, 2, 5, 9, 1000]
PARALLEL = pytest.mark.parametrize("parallel", [True, False])
# Of a reasoning item, a message, a call, a message and a call.
ORDER = [
    "response.created",
    "response.in_progress",
    *("response.output_item.added", "response.reasoning_text.delta", "response.reasoning_text.done"),
    "response.output_item.done",
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    "response.completed",
]


async def test_the_order_is_openais() -> None:
    events = events_of(await post(service_of(CALLS), stream=True))
    kinds = [event["type"] for event in events]
    assert [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]] == ORDER
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@PARALLEL
async def test_events_do_not_depend_on_how_many_tokens_are_committed_at_once(
    parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.5)  # which the ids of calls and items are made of
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = {"stream": True, "parallel_tool_calls": parallel, **logprobs}
    answers = [await post(service_of(CALLS, size), **body) for size in SIZES]
    assert len({answer.text for answer in answers}) == 1
    *_, last = events_of(answers[0])
    kinds = [item["type"] for item in last["response"]["output"]]
    assert last["type"] == "response.completed"
    assert kinds == ["reasoning", "message", "function_call", *(["message", "function_call"] if parallel else [])]


@pytest.mark.parametrize("commit_len", SIZES)
async def test_the_openai_package_builds_the_whole_answer_from_the_events(commit_len: int) -> None:
    """Its own types read each event, and its own state joins them."""
    service = service_of(CALLS, commit_len)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with openai_client(service) as client:
        whole = await client.responses.create(input="Weather?", tools=TOOLS)
        async with client.responses.stream(input="Weather?", tools=TOOLS, model="demo") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert whole.output_text == streamed.output_text == "Sure, 漢字.And:"
    shown = [
        [(item.type, getattr(item, "name", None), getattr(item, "arguments", None)) for item in response.output]
        for response in (whole, streamed)
    ]
    assert shown[0] == shown[1]
    assert [kind for kind, _, _ in shown[0]] == ["reasoning", "message", "function_call", "message", "function_call"]
    assert streamed.usage == whole.usage
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    for event in events_of(await post(service, stream=True)):
        assert adapter.validate_python(event).type == event["type"]


@PARALLEL
async def test_another_gateway_goes_on_after_every_event_with_the_same_bytes(parallel: bool) -> None:
    """It has the tokens, in other commits, and of the request what is in its record."""
    service = service_of(CALLS, 4)
    blocks = blocks_of(await post(service, stream=True, parallel_tool_calls=parallel))
    ((answer_id, (kind, prepared)),) = service.begun.items()
    recorded = SessionRecord.decode(new_record(kind, prepared).encode())
    for place, block in enumerate(blocks):
        event_id = block.split("\n")[1].removeprefix("id: ")
        other = service_of(CALLS, 1 + place % 7, tool_call_parser="none", reasoning_parser="none")
        other.begun[answer_id] = recorded.kind, recorded.prepared
        rest = await post(other, headers={"last-event-id": event_id})
        assert blocks_of(rest) == blocks[place + 1 :], event_id


async def test_the_output_limit_ends_the_item_and_the_response_as_incomplete() -> None:
    events = events_of(await post(service_of(CALLS), stream=True, max_output_tokens=40))
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_error_after_the_first_token_is_an_event_that_says_failed() -> None:
    service = service_of(CALLS, 1)
    service.script.error, service.script.error_at = VerifierLost("the verifier is gone"), 8
    blocks = blocks_of(await asyncio.wait_for(post(service, stream=True), 60))
    assert blocks[-1].startswith("event: response.failed\ndata: ")
    assert '"error":{"code":"server_error","message":"the verifier is gone"}' in blocks[-1]
