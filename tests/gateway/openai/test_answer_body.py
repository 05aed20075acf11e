"""The JSON of answers: whole and streamed say the same, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService

from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.served import AnswerDefaults
from outrider.gateway.request.tokenizer import Tokenizer
from tests.gateway.openai.answers import TEXT, USER, joined, streamed, whole

CONTINUOUS_USAGE = {"include_usage": True, "continuous_usage_stats": True}


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
        "saved_ms": 120.5,
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
