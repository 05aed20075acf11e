"""Every field of a request that holds JSON in a string, a schema or arguments: whatever it holds, none is a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from hermes_service import service_of
from test_arguments import NUM_FUZZED, broken_json

from outrider.gateway.servers.http.app import create_app

USER = {"role": "user", "content": "hi"}
KEYS = (
    *("type", "properties", "items", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs", "pattern", "format"),
    *(
        "minimum",
        "maxLength",
        "required",
        "additionalProperties",
        "patternProperties",
        "not",
        "uniqueItems",
        "$id",
        "if",
    ),
)
LEAVES = (
    "object",
    "string",
    "array",
    "#",
    "#/$defs/x",
    "#/properties/a",
    "^a(?=b)",
    "[",
    "date",
    True,
    None,
    -1,
    10**400,
)


def strange_schema(source: random.Random, depth: int = 0) -> Any:
    if depth > 3 or source.random() < 0.25:
        return source.choice(LEAVES)
    if source.random() < 0.2:
        return [strange_schema(source, depth + 1) for _ in range(source.randrange(3))]
    keys = source.sample([*KEYS, "a", "x"], source.randrange(4))
    return {key: strange_schema(source, depth + 1) for key in keys}


def tool(schema: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def strange_request(source: random.Random) -> tuple[str, str]:
    """A path, and the text of a body: Python writes NaN and half characters into JSON too."""
    text, schema = broken_json(source), strange_schema(source)
    if source.random() < 0.2:
        text = source.choice(("[" * 3_000, '{"a": "\\ud83d"}', '{"a": 1e999}', '{"a": ' + "1" * 5_000 + "}", "NaN"))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    history = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": text},
    ]
    chat = "/v1/chat/completions"
    path, body = source.choice(
        [
            (chat, {"messages": history}),
            (chat, {"messages": [USER], "tools": [tool(schema)], "tool_choice": source.choice(["auto", "required"])}),
            (chat, {"messages": [USER], "tools": [tool(schema, strict=True)], "tool_choice": "auto"}),
            (chat, {"messages": [USER], "structured_outputs": {"json": text if source.random() < 0.5 else schema}}),
            (chat, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
            ("/v1/responses", {"input": [USER, {"type": "function_call", **call["function"], "call_id": "c"}]}),
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": schema}]}),
            ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "schema": schema}}}),
            ("/v1/messages", {"max_tokens": 4, "messages": [USER], "tools": [{"name": "f", "input_schema": schema}]}),
        ]
    )  # fmt: skip
    written = json.dumps(body)
    if source.random() < 0.1:
        written = written.replace("-1", source.choice(("1e999", "-Infinity", "NaN", '"\\ud83d"')))
    return path, written


@pytest.mark.parametrize(
    "num_requests", [400, pytest.param(NUM_FUZZED, marks=[pytest.mark.storm, pytest.mark.timeout(1_800)])]
)
async def test_no_json_within_json_is_a_bug_of_ours(num_requests: int) -> None:
    source, seen = random.Random(num_requests), set[int]()
    transport = httpx.ASGITransport(create_app(service_of("Hello.")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for _ in range(num_requests):
            path, body = strange_request(source)
            reply = await http.post(path, content=body.encode(), headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400), f"{path} {body[:500]}: {reply.text[:300]}"
            seen.add(reply.status_code)
    assert seen == {200, 400}


async def test_what_no_grammar_holds_is_refused_for_strict_tools_and_logged_once_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    transport = httpx.ASGITransport(create_app(service_of("Hello.")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

        async def ask(**more: Any) -> httpx.Response:
            chat = {"messages": [USER], "tools": [tool(schema, "pick_unique", **more)], "tool_choice": "required"}
            return await http.post("/v1/chat/completions", json=chat)

        refused = (await ask(strict=True)).json()["error"]
        assert refused["param"] == "tools"
        assert refused["message"].startswith("tools: pick_unique: a grammar cannot hold numbers: uniqueItems")
        assert [(await ask()).status_code for _ in range(2)] == [200, 200]
    assert sum("pick_unique" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("arguments", ['{"city": NaN}', '{"city": 1e999}', '{"city": "\\ud83d"}', '{"city": "a\n"}'])
async def test_arguments_of_an_answer_are_in_each_apis_form(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    schema = {"type": "object", "properties": {"city": {}}}
    transport = httpx.ASGITransport(create_app(service_of(text)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        chat = {"messages": [USER], "tools": [tool(schema, "get_weather")]}
        (choice,) = (await http.post("/v1/chat/completions", json=chat)).json()["choices"]
        message = {"max_tokens": 200, "messages": [USER], "tools": [{"name": "get_weather", "input_schema": schema}]}
        (block,) = (await http.post("/v1/messages", json=message)).json()["content"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == block["input"]
    assert set(block["input"]) == {"city"}
