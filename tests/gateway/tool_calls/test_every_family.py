"""Every family's turns through the HTTP server: whole, streamed and resumed, in commits of any size, they are one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService
from test_chat_tools import events_of, joined
from tool_families import AFTER, EVERYTHING, OF_FAMILIES, SEVERAL
from tool_forms import PROPERTIES
from tool_tokenizers import tokenizer_of
from tool_transcripts import Transcript

from outrider.gateway.request.served import ServedModel
from outrider.gateway.servers.http.app import create_app

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in PROPERTIES.items()
]
COMMIT_LENS = (1, 7)


class FamilyGateway:
    """A gateway whose model writes what `says` is told."""

    def __init__(self, transcript: Transcript) -> None:
        parsers = {"reasoning_parser": transcript.reasoning_parser, "tool_call_parser": transcript.tool_call_parser}
        model = ServedModel("demo", 4096, 400, created=1, **parsers)
        self.service = ScriptedService(tokenizer_of(transcript.special), model=model)
        self._text = transcript.text
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(self.service)), base_url="http://test"
        )

    async def post(self, commit_len: int, text: str = "", last_event_id: str = "", **fields: Any) -> httpx.Response:
        self.service.script = Script(text or self._text, commit_len)
        body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "request_id": "r", **fields}
        headers = {"last-event-id": last_event_id} if last_event_id else {}
        response = await self._client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response

    async def whole(self, text: str = "", **fields: Any) -> dict[str, Any]:
        """In the form of test_chat_tools.joined."""
        (choice,) = (await self.post(1_000, text, **fields)).json()["choices"]
        message = choice["message"]
        return {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning") or "",
            "tool_calls": [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())],
            "finish_reason": choice["finish_reason"],
        }

    async def same_whole_and_streamed(self, text: str = "", **fields: Any) -> dict[str, Any]:
        whole = await self.whole(text, **fields)
        for commit_len in COMMIT_LENS:
            streamed = joined(await self.post(commit_len, text, stream=True, **fields))
            assert without_ids(streamed) == without_ids(whole), commit_len
        return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A call's id depends on when the request began."""
    return {**message, "tool_calls": [{**call, "id": ""} for call in message["tool_calls"]]}


@pytest.mark.parametrize("transcript", OF_FAMILIES, ids=lambda transcript: transcript.name)
async def test_whole_and_stream_say_what_was_written(transcript: Transcript) -> None:
    message = await FamilyGateway(transcript).same_whole_and_streamed()
    assert (message["content"], message["reasoning"]) == (transcript.content, transcript.reasoning)
    calls = [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]
    assert (calls, message["finish_reason"]) == (list(transcript.calls), "tool_calls")
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert not transcript.model_ids or ids == list(transcript.model_ids)


@pytest.mark.parametrize("transcript", EVERYTHING, ids=lambda transcript: transcript.name)
async def test_a_stream_goes_on_after_every_event(transcript: Transcript) -> None:
    gateway = FamilyGateway(transcript)
    first = await gateway.post(9, stream=True)
    blocks = first.text.split("\n\n")
    for place, (event_id, _) in enumerate(events_of(first)):
        rest = await gateway.post(9, last_event_id=event_id, stream=True)
        assert rest.text.split("\n\n") == blocks[place + 1 :], event_id


@pytest.mark.parametrize("transcript", EVERYTHING, ids=lambda transcript: transcript.name)
async def test_one_call_at_most_ends_the_output(transcript: Transcript) -> None:
    """At the same token whatever the commits, and of a stream that goes on after any event."""
    gateway, only = FamilyGateway(transcript), {"parallel_tool_calls": False, "return_token_ids": True}
    message = await gateway.same_whole_and_streamed(**only)
    calls = [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]
    assert (calls, message["finish_reason"]) == ([transcript.calls[0]], "tool_calls")
    assert AFTER not in message["content"]
    token_ids = tokenizer_of(transcript.special).encode(transcript.text, add_special_tokens=False)
    answers = [(await gateway.post(size, **only)).json() for size in (1, 2, 7, 1_000)]
    written = [answer["choices"][0]["token_ids"] for answer in answers]
    assert written == [token_ids[: len(written[0])]] * len(answers)
    assert len(written[0]) < len(token_ids)
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {len(written[0])}
    first = await gateway.post(9, stream=True, **only)
    blocks = first.text.split("\n\n")
    for place, (event_id, _) in enumerate(events_of(first)):
        rest = await gateway.post(9, last_event_id=event_id, stream=True, **only)
        assert rest.text.split("\n\n") == blocks[place + 1 :], event_id


@pytest.mark.parametrize("transcript", EVERYTHING, ids=lambda transcript: transcript.name)
async def test_what_ends_too_early_is_the_same_whole_and_streamed(transcript: Transcript) -> None:
    gateway = FamilyGateway(transcript)
    num_tokens = len(tokenizer_of(transcript.special).encode(transcript.text, add_special_tokens=False))
    for max_tokens in range(1, num_tokens, 47):
        message = await gateway.same_whole_and_streamed(max_tokens=max_tokens)
        assert message["finish_reason"] == "length"
    for stop in ("Zürich", "numbers"):  # in the first call's arguments, in the second one's
        message = await gateway.same_whole_and_streamed(stop=[stop])
        assert message["finish_reason"] == "stop"
        assert stop not in json.dumps(message, ensure_ascii=False)


@pytest.mark.parametrize("transcript", SEVERAL, ids=lambda transcript: transcript.name)
async def test_a_demanded_call_that_max_tokens_cuts_shows_no_markup(transcript: Transcript) -> None:
    """Whole, streamed and resumed; every position is in test_output_parser.py."""
    gateway, demanded = FamilyGateway(transcript), {"tool_choice": "required"}
    num_tokens = len(tokenizer_of(transcript.special).encode(transcript.text, add_special_tokens=False))
    contents = set[str]()
    for max_tokens in range(1, num_tokens, 11):
        contents.add((await gateway.whole(max_tokens=max_tokens))["content"])
        message = await gateway.whole(max_tokens=max_tokens, **demanded)
        first = await gateway.post(3, stream=True, max_tokens=max_tokens, **demanded)
        assert without_ids(joined(first)) == without_ids(message), max_tokens
        assert (message["content"], message["finish_reason"]) == ("", "length"), max_tokens
        place = max_tokens % len(events_of(first))
        event_id, _ = events_of(first)[place]
        rest = await gateway.post(3, last_event_id=event_id, stream=True, max_tokens=max_tokens, **demanded)
        assert rest.text.split("\n\n") == first.text.split("\n\n")[place + 1 :], max_tokens
    assert len(contents) > 1, "of its own accord, what is no call yet is text"


@pytest.mark.parametrize("transcript", EVERYTHING, ids=lambda transcript: transcript.name)
async def test_broken_calls_are_the_same_whole_and_streamed(transcript: Transcript) -> None:
    """A piece in the middle is missing, or there twice."""
    gateway, text = FamilyGateway(transcript), transcript.text
    for start in range(40, len(text) - 12, 97):
        for broken in (text[:start] + text[start + 9 :], text[: start + 9] + text[start:]):
            await gateway.same_whole_and_streamed(broken)
