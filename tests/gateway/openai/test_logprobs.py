"""Log-probabilities of answers and prompts: whole and streamed say the same, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx
import pytest
from gateway_script import ScriptedService

from outrider.gateway.openai.answer_body import to_json
from outrider.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from outrider.gateway.request.served import AnswerDefaults
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.messages import TokenLogprob
from tests.gateway.openai.answers import USER, joined, streamed, whole


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
