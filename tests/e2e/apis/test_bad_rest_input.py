"""Bad input over HTTP: a 4xx in OpenAI's error shape that names the field, and the service lives on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
TEN_MB = 10 * 1024 * 1024

# Body (on top of a good one), status, field.
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": "x " * 5000}, 400, "prompt"),
    ({"prompt": [5] * 2048}, 400, "prompt"),
    ({"prompt": 7}, 400, "prompt"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": {"text": "a"}}, 400, "prompt"),
    ({"prompt": [1, 4096]}, 400, "prompt"),
    ({"prompt": [1, -1]}, 400, "prompt"),
    ({"prompt": [2**63]}, 400, "prompt"),
    ({"prompt": [10**400]}, 400, "prompt"),
    ({"model": "gpt-4"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 2**62}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 1e9}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 1.01}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 2**40}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"min_tokens": 17}, 400, "min_tokens"),
    ({"n": 0}, 400, "n"),
    ({"n": -1}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"n": 10**18}, 400, "n"),
    ({"n": 100, "prompt": ["a", "b", "c"]}, 400, "n"),
    ({"seed": "x"}, 400, "seed"),
    ({"seed": 2**64}, 400, "seed"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": -1}, 400, "logprobs"),
    ({"prompt_logprobs": 100}, 400, "prompt_logprobs"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"logit_bias": {"4096": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, 400, "logit_bias"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["a"] * 65}, 400, "stop"),
    ({"stop": "a" * 1025}, 400, "stop"),
    ({"stop": 5}, 400, "stop"),
    ({"stop_token_ids": [4096]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"allowed_token_ids": [99999]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"bad_words": [""]}, 400, "bad_words"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"best_of": 4}, 400, "best_of"),
    ({"use_beam_search": True}, 400, "use_beam_search"),
    ({"truncate_prompt_tokens": -7}, 400, "truncate_prompt_tokens"),
    ({"speculation": {"method": "crystal_ball"}}, 400, "speculation.method"),
    ({"speculation": {"method": 3}}, 400, "speculation.method"),
    ({"speculation": {"num_speculative_tokens": -1}}, 400, "speculation.num_speculative_tokens"),
    ({"speculation": {"num_speculative_tokens": 10**6}}, 400, "speculation.num_speculative_tokens"),
    ({"speculation": {"mode": "hopeful"}}, 400, "speculation.mode"),
    ({"speculation": {"tokens": 3}}, 400, "speculation.tokens"),
    ({"speculation": "ngram"}, 400, "speculation"),
    ({"request_id": "two words"}, 400, "request_id"),
]
BAD_CHATS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": None}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"content": "no role"}]}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, 400, "top_logprobs"),
    ({"max_completion_tokens": -1}, 400, "max_completion_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ({"model": "gpt-4"}, 404, "model"),
]


@pytest.fixture(autouse=True)
async def lives_on(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """After every test of this file a completion works."""
    yield
    body = {"prompt": "import os", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 2


def check_error(reply: httpx.Response, status: int, param: str | None) -> str:
    """The message, after the shape was checked."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    (error,) = reply.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] == status
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    message = error["message"]
    assert isinstance(message, str)
    assert "Traceback" not in message
    if param is not None:
        assert param.rpartition(".")[2] in message
    return message


def _names(cases: list[tuple[dict[str, Any], int, str]]) -> list[str]:
    return [json.dumps(change)[:40] for change, _, _ in cases]


@pytest.mark.parametrize(("change", "status", "param"), BAD_COMPLETIONS, ids=_names(BAD_COMPLETIONS))
async def test_completions(http: httpx.AsyncClient, change: dict[str, Any], status: int, param: str) -> None:
    body = {"model": "demo-target", "prompt": "import os", "max_tokens": 16, **change}
    check_error(await http.post("/v1/completions", json=body), status, param)


@pytest.mark.parametrize(("change", "status", "param"), BAD_CHATS, ids=_names(BAD_CHATS))
async def test_chat(http: httpx.AsyncClient, change: dict[str, Any], status: int, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, **change}
    check_error(await http.post(CHAT, json=body), status, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status_in_streams_too(
    http: httpx.AsyncClient, stream: bool
) -> None:
    body = {"prompt": [1, 4096], "stream": stream}
    check_error(await http.post("/v1/completions", json=body), 400, "prompt")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'["prompt"]', "object"),
        (b"null", "object"),
    ],
    ids=["empty", "cut", "invalid-utf8", "nan", "infinity", "half-surrogate", "nested", "digits", "list", "null"],
)
async def test_a_body_that_is_no_request(http: httpx.AsyncClient, content: bytes, fragment: str) -> None:
    reply = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert fragment in check_error(reply, 400, None)


async def test_another_content_type(http: httpx.AsyncClient) -> None:
    assert "Content-Type" in check_error(await http.post("/v1/completions", data={"prompt": "a"}), 400, None)


def _pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), 65536):
        yield content[start : start + 65536]


@pytest.mark.parametrize("chunked", [False, True])
async def test_ten_megabytes_of_json(http: httpx.AsyncClient, chunked: bool) -> None:
    content = json.dumps({"prompt": "x" * TEN_MB}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for piece in _pieces(content):
            yield piece

    reply = await http.post(
        "/v1/completions",
        content=pieces() if chunked else content,
        headers={"content-type": "application/json"},
    )
    assert "body" in check_error(reply, 413, None)


async def test_as_much_json_as_a_body_may_hold(http: httpx.AsyncClient) -> None:
    token_ids = [5] * 1_000_000
    assert "context" in check_error(await http.post("/v1/completions", json={"prompt": token_ids}), 400, "prompt")
    reply = await http.post("/v1/completions", json={"prompt": "import os\n" * 300_000})
    assert "context" in check_error(reply, 400, "prompt")


async def test_unknown_endpoints_and_methods(http: httpx.AsyncClient) -> None:
    check_error(await http.post("/v1/engines", json={}), 404, None)
    check_error(await http.get("/v1/completions"), 405, None)
    check_error(await http.get("/v1/models/gpt-4"), 404, "model")


async def test_detokenize_out_of_range(http: httpx.AsyncClient) -> None:
    check_error(await http.post("/detokenize", json={"tokens": [4096]}), 400, "tokens")
    check_error(await http.post("/detokenize", json={"tokens": ["a"]}), 400, "tokens")
    check_error(await http.post("/tokenize", json={"prompt": 5}), 400, "prompt")
