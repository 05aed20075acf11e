"""The anthropic package, unchanged, against a running gateway. The demo model knows no tools: grammars make it call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from e2e_stack import DEMO_DRAFT, PATIENT, run_stack

pytestmark = pytest.mark.storm
OPEN_FILE: dict[str, Any] = {
    "type": "object",
    "properties": {"mode": {"enum": ["r", "w"]}, "line": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mode", "line"],
}
TOOLS: list[Any] = [{"name": "open_file", "description": "Opens a file.", "input_schema": OPEN_FILE}]
ASK: dict[str, Any] = {
    "model": "demo-target",
    "max_tokens": 60,
    "system": "You write Python.",
    "messages": [{"role": "user", "content": "Write a function that reads a file."}],
    "extra_body": {"seed": 5},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    args = (*PATIENT, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    run_dir = tmp_path_factory.mktemp("anthropic-stack")
    with (
        run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, gateway_args=args) as stack,
        anthropic.Anthropic(base_url=stack.url, api_key="none", timeout=120, max_retries=0) as client,
    ):
        yield client


def drafted(method: str) -> dict[str, Any]:
    return {**ASK, "extra_body": {"seed": 5, "speculation": {"method": method}}}


def shown(message: Any) -> list[tuple[Any, ...]]:
    """Without what the package adds to streamed blocks, and without ids, which are of one request."""
    return [(block.type, getattr(block, "text", None), getattr(block, "input", None)) for block in message.content]


def test_text_is_the_same_with_and_without_drafts_whole_and_streamed(client: anthropic.Anthropic) -> None:
    messages = [client.messages.create(**drafted(method)) for method in ("off", "draft_model")]
    texts = []
    for method in ("off", "ngram"):
        with client.messages.stream(**drafted(method)) as stream:
            texts.append("".join(stream.text_stream))
            messages.append(stream.get_final_message())
    first, *others = messages
    (block,) = first.content
    assert block.type == "text"
    assert texts == [block.text] * 2
    assert first.usage.output_tokens == 60
    assert first.stop_reason == "max_tokens"
    for other in others:
        assert (shown(other), other.stop_reason) == (shown(first), first.stop_reason)
        assert other.usage.output_tokens == first.usage.output_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "open_file"}])
def test_a_forced_call_follows_its_schema(client: anthropic.Anthropic, choice: Any) -> None:
    forced: dict[str, Any] = {**ASK, "tools": TOOLS, "max_tokens": 200}
    forced["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = client.messages.create(**forced)
    with client.messages.stream(**forced) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert {"content_block_start", "input_json", "content_block_stop", "message_stop"} <= set(events)
    assert shown(streamed) == shown(whole)
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    call = whole.content[-1]
    assert call.type == "tool_use"
    assert call.name == "open_file"
    jsonschema.validate(call.input, OPEN_FILE)


def test_count_tokens_says_what_the_prompt_takes(client: anthropic.Anthropic) -> None:
    asked = {name: ASK[name] for name in ("model", "messages", "system")}
    counted = client.messages.count_tokens(**asked, tools=TOOLS).input_tokens
    usage = client.messages.create(**ASK, tools=TOOLS).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stop_sequences_and_errors(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASK).content[0]
    assert text.type == "text"
    stop = text.text[10:14]
    stopped = client.messages.create(**ASK, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == text.text[: text.text.index(stop)]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**{**ASK, "model": "claude"})
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="has type 'image'"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})
