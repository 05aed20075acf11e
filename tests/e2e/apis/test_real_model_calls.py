"""SmolLM2 135M from its GGUF file, as `outrider serve` takes it: forced calls are the same bytes with every method."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from e2e_real_models import served, smollm_file

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]

METHODS = ("ngram", "suffix", "auto")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
}
MAIL = {
    "type": "object",
    "properties": {"recipient": {"type": "string", "maxLength": 30}, "urgent": {"type": "boolean"}},
    "required": ["recipient", "urgent"],
}
SCHEMAS = {"get_weather": WEATHER, "send_email": MAIL}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
QUESTIONS = ("What is the weather in Paris for three days?", "Send Anna an email about the meeting.")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with served(smollm_file(), tmp_path_factory.mktemp("real"), "--tool-call-parser", "hermes") as client:
        yield client


def asked(question: str, law: dict[str, Any], method: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 96,
        "return_token_ids": True,
        **law,
        **fields,
        "speculation": {"method": method, "annotate": True},
    }


def answer(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def meaning(choice: dict[str, Any]) -> tuple[Any, ...]:
    """All but the call's id, which is the request's own."""
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return choice["token_ids"], choice["message"]["content"], functions, choice["finish_reason"]


@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_forced_calls_are_the_same_bytes_with_every_method(
    http: httpx.Client, question: str, law: dict[str, Any]
) -> None:
    plain = answer(http, asked(question, law, "off"))
    (call,) = plain["message"]["tool_calls"]
    assert plain["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    for method in METHODS:
        drafted = answer(http, asked(question, law, method, cache_salt=method))
        assert meaning(drafted) == meaning(plain), method
        if method != "auto":  # which may find that drafts do not pay
            assert "accepted" in drafted["outrider"]["origins"]
            assert len(drafted["outrider"]["rounds"]) < len(drafted["token_ids"])


def test_a_streamed_call_is_the_whole_one(http: httpx.Client) -> None:
    law = {"temperature": 0.8, "seed": 3}
    whole = answer(http, asked(QUESTIONS[0], law, "off"))
    text = http.post("/v1/chat/completions", json=asked(QUESTIONS[0], law, "suffix", stream=True)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    entries = [entry["function"] for delta in deltas for entry in delta.get("tool_calls", ())]
    streamed = ["".join(entry.get(part, "") for entry in entries) for part in ("name", "arguments")]
    assert streamed == [whole["message"]["tool_calls"][0]["function"][part] for part in ("name", "arguments")]
