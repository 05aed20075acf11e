"""The openai package with tools, against a running gateway. The demo model knows no tools: grammars make it call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from e2e_stack import DEMO_DRAFT, PATIENT, RunningStack, run_stack

pytestmark = pytest.mark.storm
MODEL = "demo-target"
MESSAGES: list[Any] = [{"role": "user", "content": "Open the file notes.txt."}]
OPEN_FILE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["r", "w"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 99},
        "binary": {"type": "boolean"},
    },
    "required": ["mode", "line", "binary"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "open_file", "parameters": OPEN_FILE}},
    {"type": "function", "function": {"name": "close_all"}},
]
SAMPLED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 5}


class Position(pydantic.BaseModel):
    """Where."""

    line: Literal[1, 2, 3]
    is_end: bool


@pytest.fixture(scope="module")
def tool_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    args = (*PATIENT, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    run_dir = tmp_path_factory.mktemp("tool-stack")
    with run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, gateway_args=args) as running:
        yield running


@pytest.fixture(scope="module")
def client(tool_stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.id
        assert call.type == "function"
        schema = OPEN_FILE if call.function.name == "open_file" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "open_file"}}])
def test_forced_calls_are_the_same_with_and_without_drafts(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    messages = []
    for method in ("off", "ngram", "draft_model"):
        answer = client.chat.completions.create(
            **SAMPLED,
            tool_choice=choice,
            temperature=temperature,
            parallel_tool_calls=False,
            extra_body={"speculation": {"method": method, "num_speculative_tokens": 5}},
        )
        (got,) = answer.choices
        check_calls(got.message.tool_calls)
        assert got.finish_reason == ("tool_calls" if choice == "required" else "stop")
        functions = [call.function.model_dump() for call in got.message.tool_calls or []]
        messages.append((got.message.content, functions, answer.usage and answer.usage.completion_tokens))
    assert messages[0] == messages[1] == messages[2]


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**SAMPLED, "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    check_calls(final.message.tool_calls)
    assert [call.function.arguments for call in final.message.tool_calls or []] == [
        call.function.arguments for call in whole.message.tool_calls or []
    ]
    assert final.finish_reason == whole.finish_reason == "tool_calls"


def test_parse_of_a_strict_tool_and_of_a_format(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Position, name="go_to")
    asked: dict[str, Any] = {**SAMPLED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    parsed = client.chat.completions.parse(**asked)
    (call, *_) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Position)
    no_tools = {key: value for key, value in SAMPLED.items() if key != "tools"}
    answer = client.chat.completions.parse(**no_tools, response_format=Position)
    assert isinstance(answer.choices[0].message.parsed, Position)


def test_a_call_goes_on_after_every_event(tool_stack: RunningStack) -> None:
    """The rest of a stream, asked for by any of its events, is byte for byte what followed."""
    url = f"{tool_stack.url}/v1/chat/completions"
    body = {**SAMPLED, "tool_choice": "required", "stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(timeout=120) as http:
        blocks = http.post(url, json=body).text.split("\n\n")
        ids = [block.split("\n")[0].removeprefix("id: ") for block in blocks if block.startswith("id:")]
        assert len(ids) > 5
        for place, event_id in enumerate(ids):
            rest = http.post(url, json=body, headers={"last-event-id": event_id}).text
            assert rest.split("\n\n") == blocks[place + 1 :], event_id
