"""Several conversations in one request are answered as each would be alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

CITY = [{"role": "user", "content": "Which city?"}]
HALF = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello, "}]


async def batch(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions/batch", json=body)


async def test_each_conversation_has_the_answer_that_it_has_alone(http: httpx.AsyncClient) -> None:
    body = {"max_tokens": 12, "logprobs": True, "echo": True, "return_token_ids": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    together = (await batch(http, messages=[CITY, HALF], **body)).json()
    alone = [
        (await http.post("/v1/chat/completions", json={"messages": messages, **body})).json()
        for messages in (CITY, HALF)
    ]
    assert together["choices"] == [{**one["choices"][0], "index": place} for place, one in enumerate(alone)]
    assert together["choices"][1]["message"]["content"].startswith("Hello, ")
    assert together["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
    assert (together["prompt_token_ids"], together["object"]) == (None, "chat.completion")


async def test_a_batch_of_one(http: httpx.AsyncClient) -> None:
    [choice] = (await batch(http, messages=[CITY], max_tokens=2, stream=False, n=1)).json()["choices"]
    assert choice["message"]["content"] == "Paris"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [CITY], "stream": True}, "stream"),
        ({"messages": [CITY], "n": 2}, "n"),
        ({"messages": [CITY], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [CITY], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": CITY}, "messages"),
        ({"messages": [CITY, []]}, "messages"),
        ({"messages": [CITY] * 257}, "messages"),
        ({"messages": [CITY], "temperature": -1}, "temperature"),
        ({}, "messages"),
    ],
)
async def test_refusals_name_the_field(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await batch(http, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    if body.get("messages") == [CITY, []]:
        assert "conversation 1" in response.json()["error"]["message"]
