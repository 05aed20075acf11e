"""Qwen2.5-Coder 0.5B calls tools of its own accord (`tool_choice` auto): the same bytes with every method, streamed or
whole, and when the verifier dies in the middle of a call's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from e2e_real_models import METHODS, events_of
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


def whole_choice(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(CHAT, json=body)
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


def streamed_meaning(
    http: httpx.Client, body: dict[str, Any], watch: Callable[[dict[str, Any]], None] = lambda _meaning: None
) -> dict[str, Any]:
    """What the deltas come to; `watch` sees that after each event."""
    seen: dict[str, Any] = {"token_ids": [], "content": "", "calls": [], "finish_reason": None}
    with http.stream("POST", CHAT, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        for event in events_of(reply.iter_lines()):
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
def plain(real_http: httpx.Client) -> Callable[[str, str], dict[str, Any]]:
    """The answer without speculation, asked for once."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def answer(question: str, law: str) -> dict[str, Any]:
        if (question, law) not in known:
            known[question, law] = meaning(whole_choice(real_http, asked(question, law, "off")))
        return known[question, law]

    return answer


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_the_same_with_every_method_whole_and_streamed(
    real_http: httpx.Client, plain: Callable[[str, str], dict[str, Any]], question: str, law: str
) -> None:
    expected = plain(question, law)
    print(question, law, expected["calls"] or expected["content"])
    assert (expected["finish_reason"] == "tool_calls") == bool(expected["calls"])
    for method in METHODS:
        drafted = whole_choice(real_http, asked(question, law, method))
        assert meaning(drafted) == expected, method
        # so that its drafts differ from those of the whole answer
        streamed = asked(question, law, method, cache_salt="streamed", speculation={"method": method})
        assert streamed_meaning(real_http, streamed) == expected, method


def test_it_calls_of_its_own_accord_and_drafts_are_accepted(
    real_http: httpx.Client, plain: Callable[[str, str], dict[str, Any]]
) -> None:
    """Or the other tests here would show little."""
    named = [call["name"] for question in QUESTIONS[:2] for call in plain(question, "greedy")["calls"]]
    assert named == ["get_weather", "calculate"]
    for method in METHODS:
        if method != "auto":  # which may find that drafts do not pay
            choice = whole_choice(real_http, asked(QUESTIONS[0], "greedy", method, cache_salt="accepted"))
            assert "accepted" in choice["outrider"]["origins"], method
            assert len(choice["outrider"]["rounds"]) < len(choice["token_ids"])


@pytest.mark.parametrize("law", LAWS)
def test_a_verifier_dies_in_the_middle_of_free_arguments(
    real_stack: RunningStack,
    real_http: httpx.Client,
    plain: Callable[[str, str], dict[str, Any]],
    law: str,
) -> None:
    expected = plain(QUESTIONS[0], law)
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

    body = asked(QUESTIONS[0], law, "suffix", cache_salt="killed")
    assert streamed_meaning(real_http, body, watch) == expected
    assert is_killed
    assert real_stack.metric("outrider:verifier_failovers_total") > num_before, "it died behind the call"
    real_stack.wait_fleet(timeout_s=60)
