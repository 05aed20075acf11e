"""The JSON of answers: whole and streamed say the same, in the shapes of OpenAI and vLLM.

The TypedDicts that document the answers are the schema here: pydantic checks every body and every event against them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService
from pydantic import ConfigDict, TypeAdapter, with_config

from outrider.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from outrider.gateway.openai.response_types import ChatCompletion, ChatCompletionChunk, Completion
from outrider.gateway.openai.responses import to_json
from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.served import AnswerDefaults
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.messages import TokenLogprob

TEXT = "Paris is the capital 漢字 👩‍👩‍👧 of France."
USER = [{"role": "user", "content": "hi"}]
CONTINUOUS_USAGE = {"include_usage": True, "continuous_usage_stats": True}
STRICT = ConfigDict(extra="forbid", strict=True)
SCHEMAS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(with_config(STRICT)(kind)) for kind in (Completion, ChatCompletion, ChatCompletionChunk)
}


async def whole(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    chat = "messages" in body
    response = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    SCHEMAS["ChatCompletion" if chat else "Completion"].validate_json(response.text)
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(http: httpx.AsyncClient, **body: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """All events' JSON, and the cursors in their ids."""
    chat = "messages" in body
    body = {**body, "stream": True}
    response = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events, ids = [], []
    for block in blocks[:-2]:
        id_line, line = [line for line in block.split("\n") if not line.startswith(":")]
        ids.append(id_line.rpartition(":")[2])
        data = line.removeprefix("data: ")
        assert id_line == f"id: {json.loads(data)['id']}:{ids[-1]}"
        SCHEMAS["ChatCompletionChunk" if chat else "Completion"].validate_json(data)
        events.append(json.loads(data))
    return events, ids


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice put together again from its events."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    result = {"text": text, **{name: choices[-1][name] for name in ("finish_reason", "stop_reason")}}
    for name in ("token_ids",):
        result[name] = [value for choice in choices for value in choice.get(name, [])]
    for name in ("origins", "token_texts"):
        result[name] = [value for choice in choices for value in choice.get("outrider", {}).get(name, [])]
    return result


# ---- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit_len", [1, 3, 7, 100])
@pytest.mark.parametrize("prompt", [{"prompt": "Hello"}, {"messages": USER}])
async def test_stream_and_whole_agree(
    http: httpx.AsyncClient, service: ScriptedService, commit_len: int, prompt: dict[str, Any]
) -> None:
    service.script.commit_len = commit_len
    body = {**prompt, "max_tokens": 200, "return_token_ids": True, "n": 3}
    answer = await whole(http, **body)
    events, _ = await streamed(http, **body)
    for choice in answer["choices"]:
        again = joined(events, choice["index"])
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text == again["text"] == TEXT * (choice["index"] + 1)
        assert choice["finish_reason"] == again["finish_reason"] == "stop"
        assert choice["token_ids"] == again["token_ids"] == choice["outrider"]["token_ids"]
        assert choice["outrider"]["origins"] == again["origins"]
        assert "".join(again["token_texts"]) == text
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert service.num_open == 0


@pytest.mark.parametrize("commit_len", [1, 4, 50])
async def test_stop_string(http: httpx.AsyncClient, service: ScriptedService, commit_len: int) -> None:
    service.script.commit_len = commit_len
    for include, expected in ((False, "Paris is the "), (True, "Paris is the capital")):
        body = {"prompt": "x", "max_tokens": 60, "stop": ["capital"], "include_stop_str_in_output": include}
        [choice] = (await whole(http, **body))["choices"]
        again = joined((await streamed(http, **body))[0])
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", "capital")
        assert (again["text"], again["finish_reason"], again["stop_reason"]) == (expected, "stop", "capital")


async def test_length(http: httpx.AsyncClient) -> None:
    [choice] = (await whole(http, prompt="x", max_tokens=2))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Paris", "length", None)


async def test_several_prompts_are_indexed_prompt_first(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 80, "echo": True}
    texts = ["a" + TEXT, "a" + TEXT * 2, "b" + TEXT, "b" + TEXT * 2]
    answer = await whole(http, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == texts
    events, _ = await streamed(http, **body)
    assert [joined(events, index)["text"] for index in range(4)] == texts


async def test_head_of_answers(http: httpx.AsyncClient) -> None:
    answer = await whole(http, messages=USER, request_id="mine")
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-mine", "chat.completion", "demo")
    events, _ = await streamed(http, prompt="x", request_id="mine")
    assert {(event["id"], event["object"]) for event in events} == {("cmpl-mine", "text_completion")}
    events, _ = await streamed(http, messages=USER)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


# ---- events -----------------------------------------------------------------------------------------------------


async def test_ids_count_the_tokens_of_an_output(
    http: httpx.AsyncClient, service: ScriptedService, tokenizer: Tokenizer
) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    usage = {"stream_options": {"include_usage": True}}
    _, ids = await streamed(http, messages=USER, return_token_ids=True, **usage)
    assert ids == ["0", *map(str, range(3, num_tokens, 3)), f"{num_tokens}f", f"{num_tokens}f$"]
    events, ids = await streamed(http, prompt="x", max_tokens=100)
    assert ids[-1] == f"{num_tokens}f"
    assert len(ids) == len(events) < num_tokens / 3  # what completes no text makes no event


async def test_ids_count_the_tokens_of_every_output(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script.text, service.script.commit_len = "a b c d", 2
    _, ids = await streamed(http, prompt=["x", "y"], max_tokens=3, n=2, echo=True)
    assert ids[-1] == "3f.3f.3f.3f"
    parts = [cursor.split(".") for cursor in ids]
    for earlier, later in pairwise(parts):
        changed = [place for place in range(len(later)) if earlier[place : place + 1] != later[place : place + 1]]
        assert len([place for place in changed if later[place] != "-"]) == 1, "one part moves with every event"


async def blocks_of(http: httpx.AsyncClient, method: str, path: str, **arguments: Any) -> list[str]:
    response = await http.request(method, path, **arguments)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return re.sub("^:.*\n", "", response.text, flags=re.MULTILINE).split("\n\n")  # without comments


RESUMABLE: list[dict[str, Any]] = [
    {"prompt": "Hello", "max_tokens": 60},
    {"prompt": "Hello", "max_tokens": 60, "logprobs": 1, "echo": True, "stream_options": {"include_usage": True}},
    {"prompt": "Hello", "max_tokens": 60, "stop": ["of"], "return_token_ids": True},
    {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": ["x", "y"], "n": 2, "max_tokens": 9, "stream_options": CONTINUOUS_USAGE},
    {"messages": USER, "max_tokens": 60, "logprobs": True, "top_logprobs": 1, "speculation": {"annotate": True}},
]


@pytest.mark.parametrize("body", RESUMABLE)
async def test_every_event_can_be_resumed_after(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """To the byte, whatever the last event was; other choices' events that were seen are not told again."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    blocks = await blocks_of(http, "POST", path, json={**body, "stream": True, "request_id": "r"})
    ids = [block.split("\n")[0].removeprefix("id: ") for block in blocks[:-2]]
    assert len(set(ids)) == len(ids)
    stream = f"/v1/streams/{ids[0].rpartition(':')[0]}"
    assert await blocks_of(http, "GET", stream) == blocks
    for place, last_id in enumerate(ids):
        headers = {"Last-Event-ID": last_id}
        assert await blocks_of(http, "GET", stream, headers=headers) == blocks[place + 1 :]
        assert await blocks_of(http, "POST", path, headers=headers) == blocks[place + 1 :]
        assert await blocks_of(http, "POST", path, headers=headers, json=body) == blocks[place + 1 :]


async def test_an_answer_that_was_no_stream_can_be_had_as_one(http: httpx.AsyncClient) -> None:
    answer = await whole(http, prompt="x", max_tokens=60)
    blocks = await blocks_of(http, "GET", f"/v1/streams/{answer['id']}")
    events = [json.loads(block.partition("data: ")[2]) for block in blocks[:-2]]
    assert joined(events)["text"] == answer["choices"][0]["text"]


async def test_no_raw_line_separator_in_events(http: httpx.AsyncClient, service: ScriptedService) -> None:
    """Many clients split lines where Python's splitlines does."""
    service.script.text = "a\u2028b\u2029c\x85d\re\nf\x0bg"
    response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 60, "stream": True})
    assert all(line == "" or line.startswith(("data: ", "id: ")) for line in response.text.splitlines())
    assert joined((await streamed(http, prompt="x", max_tokens=60))[0])["text"] == service.script.text


async def test_usage_in_streams(http: httpx.AsyncClient) -> None:
    events, _ = await streamed(http, prompt="Hello", max_tokens=5)
    assert not any("usage" in event for event in events)
    events, _ = await streamed(http, prompt="Hello", max_tokens=5, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert events[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] == 20
    events, _ = await streamed(http, prompt="Hello", max_tokens=5, stream_options=CONTINUOUS_USAGE)
    assert [event["usage"]["completion_tokens"] for event in events] == [3, 5, 5]
    options = {"continuous_usage_stats": True}  # nothing by itself, as in vLLM
    events, _ = await streamed(http, prompt="Hello", max_tokens=5, stream_options=options)
    assert not any("usage" in event for event in events)


async def test_annotations_only_when_asked_for(http: httpx.AsyncClient) -> None:
    events, _ = await streamed(http, prompt="x", max_tokens=6)
    assert not any("outrider" in event["choices"][0] for event in events)
    events, _ = await streamed(http, prompt="x", max_tokens=6, speculation={"annotate": True})
    assert events[0]["choices"][0]["outrider"]["origins"] == ["accepted", "accepted", "corrected"]
    assert "token_ids" not in events[0]["choices"][0]
    assert joined(events)["token_texts"] == ["Par", "is", " is", " the", " cap", "it"]


async def test_prompt_token_ids(http: httpx.AsyncClient) -> None:
    body = {"prompt": "Hello", "return_token_ids": True, "max_tokens": 2}
    assert (await whole(http, **body))["choices"][0]["prompt_token_ids"] == [44, 339, 308]
    assert (await streamed(http, **body))[0][0]["choices"][0]["prompt_token_ids"] == [44, 339, 308]
    chat = {"messages": USER, "return_token_ids": True}
    prompt = (await whole(http, **chat))["prompt_token_ids"]
    assert prompt[0] == 2
    assert (await streamed(http, **chat))[0][0]["prompt_token_ids"] == prompt


# ---- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 12, "logprobs": 1}
    if stream:
        events, _ = await streamed(http, **body)
        parts = [event["choices"][0]["logprobs"] for event in events]
        shown = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        text = joined(events)["text"]
    else:
        [choice] = (await whole(http, **body))["choices"]
        shown, text = choice["logprobs"], choice["text"]
    assert shown["tokens"][:3] == ["Par", "is", " is"]
    assert shown["token_logprobs"][:2] == [-1.039, -0.371]
    assert shown["top_logprobs"][0] == {"&": -0.5, "Par": -1.039}
    assert shown["text_offset"][:6] == [0, 3, 5, 8, 12, 16]
    # The three tokens of a character begin where it begins.
    place = shown["tokens"].index("�")
    assert text[shown["text_offset"][place] :].startswith("漢")


async def test_logprobs_of_zero_show_the_chosen_token(http: httpx.AsyncClient) -> None:
    [choice] = (await whole(http, prompt="x", max_tokens=1, logprobs=0))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"Par": -1.039}]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"messages": USER, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    if stream:
        events, _ = await streamed(http, **body)
        parts = [event["choices"][0]["logprobs"] for event in events[1:]]
        content = [entry for part in parts for entry in part["content"]]
    else:
        content = (await whole(http, **body))["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    assert content[0] == {
        "token": "Par",
        "logprob": -1.039,
        "bytes": [80, 97, 114],
        "top_logprobs": [
            {"token": "&", "logprob": -0.5, "bytes": [38]},
            {"token": "'", "logprob": -1.5, "bytes": [39]},
        ],
    }
    whole_text = bytes(byte for entry in content for byte in entry["bytes"])
    assert whole_text.decode(errors="ignore") == "Paris is the capital 漢"


async def test_logprobs_of_named_tokens(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """All of them, whatever the count asked for; in a chat behind the chosen token, once each, as in vLLM."""
    sampled = tokenizer.encode("Paris")[0]
    named = {"max_tokens": 1, "logprob_token_ids": [20, sampled, 21], "return_tokens_as_token_ids": True}
    chat = {"messages": USER, "logprobs": True, **named}
    events, _ = await streamed(http, **chat)
    for choice in [*(await whole(http, **chat))["choices"], events[1]["choices"][0]]:
        [entry] = choice["logprobs"]["content"]
        tops = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        assert tops == [(f"token_id:{sampled}", -sampled / 1000), ("token_id:20", -0.5), ("token_id:21", -2.5)]
    [choice] = (await whole(http, prompt="x", logprobs=0, **named))["choices"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == [f"token_id:{sampled}", "token_id:20", "token_id:21"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "logprobs": 1, "echo": True}
    if stream:
        events, _ = await streamed(http, **body)
        parts = [event["choices"][0]["logprobs"] for event in events]
        shown = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        assert joined(events)["text"] == "HelloParis"
    else:
        [choice] = (await whole(http, **body))["choices"]
        shown = choice["logprobs"]
        assert choice["text"] == "HelloParis"
    assert shown["tokens"] == ["H", "el", "lo", "Par", "is"]
    assert shown["token_logprobs"] == [None, -0.339, -0.308, -1.039, -0.371]
    assert shown["top_logprobs"][0] is None
    assert shown["text_offset"] == [0, 1, 3, 5, 8]


@pytest.mark.parametrize("by_server", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_can_be_named_by_their_ids(
    http: httpx.AsyncClient, service: ScriptedService, stream: bool, by_server: bool
) -> None:
    """Every token of the lists decodes to the answer; the first of the alternatives is the chosen one, as in vLLM."""
    asked = {} if by_server else {"return_tokens_as_token_ids": True}
    service.model = replace(service.model, answer_defaults=AnswerDefaults(return_tokens_as_token_ids=by_server))
    body = {"prompt": "Hello 漢", "max_tokens": 14, "logprobs": 1, "echo": True, **asked}
    parts = (await streamed(http, **body))[0] if stream else [await whole(http, **body)]
    shown = [part["choices"][0]["logprobs"] for part in parts]
    names = [name for one in shown for name in one["tokens"]]
    tops = [top for one in shown for top in one["top_logprobs"]]
    assert all(name.startswith("token_id:") for name in names)
    text = service.tokenizer.decode([int(name.removeprefix("token_id:")) for name in names])
    assert text == "Hello 漢Paris is the capital 漢字"
    assert [next(iter(top)) for top in tops[1:]] == names[1:]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chats_tokens_can_be_named_by_their_ids(
    http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool
) -> None:
    body = {"messages": USER, "max_tokens": 12, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    parts = (await streamed(http, **body))[0][1:] if stream else [await whole(http, **body)]
    content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    ids = [int(entry["token"].removeprefix("token_id:")) for entry in content]
    assert tokenizer.decode(ids).startswith("Paris is the capital 漢")
    assert [bytes(entry["bytes"]) for entry in content] == [tokenizer.token_bytes(token_id) for token_id in ids]
    assert {entry["top_logprobs"][0]["token"] for entry in content} == {f"token_id:{tokenizer.encode('&')[0]}"}


async def test_a_request_overrules_the_server(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.model = replace(service.model, answer_defaults=AnswerDefaults(return_tokens_as_token_ids=True))
    body = {"prompt": "x", "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": False}
    assert (await whole(http, **body))["choices"][0]["logprobs"]["tokens"] == ["Par"]


ASSISTANT = [*USER, {"role": "assistant", "content": "It is: "}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("body", "echoed"),
    [
        ({"messages": ASSISTANT, **CONTINUED, "echo": True}, "It is: "),
        ({"messages": ASSISTANT, **CONTINUED, "echo": False}, ""),
        ({"messages": ASSISTANT, **CONTINUED}, ""),
        ({"messages": USER, "echo": True}, ""),
    ],
)
async def test_a_chat_can_begin_with_the_message_it_continues(
    http: httpx.AsyncClient, body: dict[str, Any], echoed: str
) -> None:
    answer = await whole(http, **body, max_tokens=40, n=2)
    events, _ = await streamed(http, **body, max_tokens=40, n=2)
    for choice in answer["choices"]:
        text = TEXT * (choice["index"] + 1)
        assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]}
        assert choice["message"]["content"] == joined(events, choice["index"])["text"]
        assert choice["message"]["content"].startswith(echoed + text[:20])


async def test_usage_can_be_in_every_event_unasked(http: httpx.AsyncClient, service: ScriptedService) -> None:
    """As vLLM's --enable-force-include-usage."""
    service.model = replace(service.model, answer_defaults=AnswerDefaults(include_usage=True))
    for body in ({"prompt": "x"}, {"messages": USER}):
        asked = {"max_tokens": 5, "stream_options": CONTINUOUS_USAGE}
        events, _ = await streamed(http, **body, max_tokens=5)
        expected, _ = await streamed(http, **body, **asked)
        assert [event["usage"] for event in events] == [event["usage"] for event in expected]
        assert events[-1]["choices"] == []


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("given", ["text", "token ids"])
async def test_offsets_point_into_the_echoed_text(
    http: httpx.AsyncClient, tokenizer: Tokenizer, given: str, skip: bool
) -> None:
    """The echo of token ids shows special tokens, as in vLLM, whatever the output does."""
    text = "a<|user|>\nHello 漢<|end|>b"
    prompt = text if given == "text" else tokenizer.encode(text)
    body = {"prompt": prompt, "max_tokens": 2, "logprobs": 0, "echo": True, "skip_special_tokens": skip}
    [choice] = (await whole(http, **body))["choices"]
    shown, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert shown == text + "Paris"
    for place, token_id in enumerate(tokenizer.encode(text)):
        token = tokenizer.token_text(token_id)
        if "\ufffd" not in token:
            assert shown[offsets[place] : offsets[place + 1]] == token
    assert shown[offsets[-2] :] == "Paris"


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"messages": USER}], ids=["completion", "chat"])
async def test_keys_of_what_was_not_asked_for_are_null(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """vLLM's whole answers have them; its streams leave out what is not set."""
    answer = await whole(http, **body, max_tokens=3)
    holder = answer if "messages" in body else answer["choices"][0]
    assert {name: holder[name] for name in ("prompt_logprobs", "prompt_token_ids")} == {
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert answer["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_alone_can_be_scored(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "Hello", "max_tokens": 0, "logprobs": 1, "echo": True}
    if stream:
        events, _ = await streamed(http, **body, stream_options={"include_usage": True})
        assert joined(events)["text"] == "Hello"
        usage = events[-1]["usage"]
    else:
        answer = await whole(http, **body)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.339, -0.308]
        usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)


async def test_prompt_logprobs(http: httpx.AsyncClient) -> None:
    expected = {"339": {"logprob": -0.339, "rank": 2, "decoded_token": "el"}}
    answer = await whole(http, prompt="Hello", prompt_logprobs=0, max_tokens=1)
    shown = answer["choices"][0]["prompt_logprobs"]
    assert shown[:2] == [None, expected]
    assert len(shown) == 3
    answer = await whole(http, messages=USER, prompt_logprobs=1)
    assert answer["prompt_logprobs"][1]["10"] == {"logprob": -0.5, "rank": 1, "decoded_token": "&"}


def test_infinite_logprobs_become_numbers(tokenizer: Tokenizer) -> None:
    entry = TokenLogprob(-math.inf, 9, (10,), (-math.inf,))
    shown = chat_logprobs(tokenizer, [5], [entry], 1)
    assert shown["content"][0]["logprob"] == shown["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    assert prompt_logprobs(tokenizer, [5, 6], []) == [None, None]
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(math.nan)


# ---- speculation figures ----------------------------------------------------------------------------------------


async def test_speculation_metrics(http: httpx.AsyncClient, service: ScriptedService) -> None:
    summary = (await whole(http, prompt="x"))["metrics"]["speculative_decoding"]
    assert summary == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.3,
        "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 20,
        "num_spec_tokens": 5,
    }
    several = (await whole(http, prompt="x", n=3))["metrics"]["speculative_decoding"]
    assert (several["num_spec_steps"], several["acceptance_histogram"]) == (12, [3, 3, 3, 3])
    assert several["mean_acceptance_length"] == 2.5
    assert "metrics" not in await whole(http, prompt="x", speculation={"method": "off"})
    service.spec_metrics = SpecMetricsLevel.DETAILED
    detailed = (await whole(http, prompt="x"))["metrics"]["speculative_decoding"]
    assert detailed == {**summary, "per_step_accepted": [0, 1, 2, 3], "per_step_drafted": [5, 5, 5, 5]}
    assert "per_step_drafted" not in (await whole(http, prompt="x", n=2))["metrics"]["speculative_decoding"]
    service.spec_metrics = SpecMetricsLevel.NONE
    assert "metrics" not in await whole(http, prompt="x")


async def test_usage_of_the_whole(http: httpx.AsyncClient) -> None:
    usage = (await whole(http, prompt=["Hello", "Hello"], n=2, max_tokens=4))["usage"]
    assert usage == {
        "prompt_tokens": 6,
        "completion_tokens": 16,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
