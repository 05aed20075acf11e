"""The openai package's Responses API against a running gateway: grammars make the demo model call tools."""

from __future__ import annotations

import contextlib
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
OPEN_FILE: dict[str, Any] = {
    "type": "object",
    "properties": {"mode": {"enum": ["r", "w"]}, "line": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mode", "line"],
}
TOOLS: list[Any] = [{"type": "function", "name": "open_file", "parameters": OPEN_FILE, "strict": True}]
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
ASKED: dict[str, Any] = {"model": "demo-target", "input": "Open the file notes.txt.", "max_output_tokens": 200}
# The demo model's own takes no role tool.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}assistant: "
)
SEED: dict[str, Any] = {"extra_body": {"seed": 5}}


class Position(pydantic.BaseModel):
    """Where."""

    line: Literal[1, 2, 3]
    is_end: bool


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    run_dir = tmp_path_factory.mktemp("responses-stack")
    (run_dir / "chat.jinja").write_text(TEMPLATE)
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "none")
    args = (*PATIENT, *parsers, "--chat-template", str(run_dir / "chat.jinja"))
    with run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, gateway_args=args) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_a_streamed_response_is_the_whole_one_with_and_without_drafts(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 24}
    texts = []
    for method in ("off", "ngram", "draft_model"):
        body = {"seed": 5, "speculation": {"method": method}}
        texts.append(client.responses.create(**asked, extra_body=body).output_text)
        events = list(client.responses.create(**asked, extra_body=body, stream=True))
        texts.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
        assert events[-1].type in ("response.completed", "response.incomplete")
    assert texts[0]
    assert len(set(texts)) == 1


def test_a_loop_of_forced_calls_through_stored_responses(client: openai.OpenAI) -> None:
    previous: str | None = None
    asked = ASKED["input"]
    for turn in range(2):
        made = client.responses.create(
            **{**ASKED, "input": asked}, **FORCED, **SEED, previous_response_id=previous or openai.omit
        )
        assert made.status == "completed"
        (call,) = [item for item in made.output if item.type == "function_call"]
        jsonschema.validate(json.loads(call.arguments), OPEN_FILE)
        previous = made.id
        asked = [{"type": "function_call_output", "call_id": call.call_id, "output": f"opened {turn}"}]
    items = client.responses.input_items.list(made.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def parsed_position(client: openai.OpenAI) -> Position | None:
    """Of the first seed by which the demo model does not write whitespace, which JSON allows, to the end."""
    for seed in range(40):
        with contextlib.suppress(pydantic.ValidationError):
            answer = client.responses.parse(**ASKED, extra_body={"seed": seed}, text_format=Position)
            if answer.status == "completed":
                return answer.output_parsed
    return None


def test_stream_and_parse_of_a_strict_tool_and_of_a_format(client: openai.OpenAI) -> None:
    assert isinstance(parsed_position(client), Position)
    tool = openai.pydantic_function_tool(Position, name="go_to")
    flat = {"type": "function", **tool["function"]}
    forced = {**FORCED, "tools": [flat]}
    with client.responses.stream(**ASKED, **forced, **SEED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    (call,) = [item for item in final.output if item.type == "function_call"]
    Position.model_validate_json(call.arguments)


def test_a_stream_goes_on_after_every_event(stack: RunningStack) -> None:
    """The rest of a stream, asked for by any of its events, is byte for byte what followed."""
    url = f"{stack.url}/v1/responses"
    with httpx.Client(timeout=120) as http:
        blocks = http.post(url, json={**ASKED, **FORCED, "seed": 5, "stream": True}).text.split("\n\n")
        ids = [block.split("\n")[1].removeprefix("id: ") for block in blocks if block.startswith("event:")]
        assert len(ids) > 5
        for place, event_id in enumerate(ids):
            rest = http.post(url, headers={"last-event-id": event_id}).text
            assert [block for block in rest.split("\n\n") if block] == blocks[place + 1 : -1], event_id
