"""Qwen2.5-Coder 0.5B calls tools of its own accord (`tool_choice` auto): the same bytes with every method, streamed or
whole, and when the verifier dies in the middle of a call's arguments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from e2e_real_models import METHODS, START_TIMEOUT_S
from e2e_stack import RunningStack

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]
CHAT = "/v1/chat/completions"


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    tool("get_weather", "Weather of a city.", city=TEXT, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    tool("calculate", "Value of an arithmetic expression.", expression=TEXT),
]
QUESTIONS = ("What is the weather in Paris, in celsius?", "What is 345 plus 678?", "Say hello in French.")
LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 13}}


Plain = Callable[[str, str], Awaitable[dict[str, Any]]]


def asked(question: str, law: str, method: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "max_tokens": 64,
        "return_token_ids": True,
        **LAWS[law],
        # Outputs of earlier requests would be all that a suffix draft needs.
        "cache_salt": f"{question} {law} {method}",
        "speculation": {"method": method, "annotate": True},
        **fields,
    }


async def whole_choice(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def meaning(choice: dict[str, Any]) -> dict[str, Any]:
    """All but the calls' ids, which are the request's own."""
    message = choice["message"]
    return {
        "token_ids": choice["token_ids"],
        "content": message["content"] or "",
        "calls": [call["function"] for call in message.get("tool_calls") or ()],
        "finish_reason": choice["finish_reason"],
    }


async def streamed_meaning(
    http: httpx.AsyncClient, body: dict[str, Any], watch: Callable[[dict[str, Any]], None] = lambda _meaning: None
) -> dict[str, Any]:
    """What the deltas come to; `watch` sees that after each event."""
    seen: dict[str, Any] = {"token_ids": [], "content": "", "calls": [], "finish_reason": None}
    async with http.stream("POST", CHAT, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    _add(seen, choice)
                watch(seen)
    return seen


def _add(seen: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    seen["token_ids"] += choice.get("token_ids") or []
    seen["content"] += delta.get("content") or ""
    for entry in delta.get("tool_calls", ()):
        if "id" in entry:
            assert entry["index"] == len(seen["calls"])
            seen["calls"].append({"name": entry["function"]["name"], "arguments": ""})
        seen["calls"][entry["index"]]["arguments"] += entry["function"].get("arguments", "")
    seen["finish_reason"] = choice["finish_reason"] or seen["finish_reason"]


@pytest.fixture(scope="module")
def plain(real_http: httpx.AsyncClient) -> Plain:
    """The answer without speculation, asked for once."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    async def answer(question: str, law: str) -> dict[str, Any]:
        if (question, law) not in known:
            known[question, law] = meaning(await whole_choice(real_http, asked(question, law, "off")))
        return known[question, law]

    return answer


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("question", QUESTIONS)
async def test_an_answer_is_the_same_with_every_method_whole_and_streamed(
    real_http: httpx.AsyncClient, plain: Plain, question: str, law: str
) -> None:
    expected = await plain(question, law)
    print(question, law, expected["calls"] or expected["content"])
    assert (expected["finish_reason"] == "tool_calls") == bool(expected["calls"])
    drafted = await asyncio.gather(*(whole_choice(real_http, asked(question, law, method)) for method in METHODS))
    streamed = await asyncio.gather(
        *(streamed_meaning(real_http, asked(question, law, method, cache_salt=f"s {method}")) for method in METHODS)
    )
    for method, choice, seen in zip(METHODS, drafted, streamed, strict=True):
        assert meaning(choice) == expected, method
        assert seen == expected, method
        if expected["calls"] and method in ("ngram", "suffix"):  # auto may find that drafts do not pay
            assert "accepted" in choice["outrider"]["origins"], method
            assert len(choice["outrider"]["rounds"]) < len(choice["token_ids"])


async def test_it_calls_of_its_own_accord(plain: Plain) -> None:
    """Or the other tests here would show little."""
    for law in LAWS:
        named = [call["name"] for question in QUESTIONS[:2] for call in (await plain(question, law))["calls"]]
        assert named == ["get_weather", "calculate"], law


@pytest.mark.parametrize("law", LAWS)
async def test_a_verifier_dies_in_the_middle_of_free_arguments(
    real_stack: RunningStack, real_http: httpx.AsyncClient, plain: Plain, law: str
) -> None:
    expected = await plain(QUESTIONS[0], law)
    assert expected["calls"], "nothing to kill in"
    num_before = real_stack.metric("outrider:verifier_failovers_total")
    is_killed = False

    def watch(seen: dict[str, Any]) -> None:
        nonlocal is_killed
        if not is_killed and seen["calls"] and seen["calls"][0]["arguments"]:
            assert seen["finish_reason"] is None, "it ended before the kill"
            is_killed = True
            real_stack.kill("verifier")
            real_stack.revive()

    # Short drafts, so that rounds are left behind the first piece of the arguments.
    few = {"speculation": {"method": "draft_model", "num_speculative_tokens": 2}}
    assert await streamed_meaning(real_http, asked(QUESTIONS[0], law, "draft_model", **few), watch) == expected
    assert is_killed
    assert real_stack.metric("outrider:verifier_failovers_total") > num_before, "it died behind the call"
    await asyncio.to_thread(real_stack.wait_fleet, START_TIMEOUT_S)
