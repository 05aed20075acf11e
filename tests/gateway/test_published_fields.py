"""Every field of a request that the installed packages of OpenAI and Anthropic know has an effect, has none, or is
refused by its name.

A field that comes with a new version of a package fails here until somebody has decided. What the fields do is tested
beside the code that does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from hermes_service import service_of
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from tool_forms import HERMES
from tool_tokenizers import TEMPLATE, tokenizer_of

from outrider.gateway.servers.http.app import create_app

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "Of a city.", "parameters": SCHEMA}
EFFECT, NO_EFFECT, REFUSED = "effect", "no effect", "refused"


@dataclass(frozen=True)
class Case:
    """beside: the other fields without which `value` would make no sense; they are sent with and without it."""

    outcome: str
    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Surface:
    """params: the packages' types of the request. base: the request that one field is added to."""

    path: str
    params: tuple[type, ...]
    base: Mapping[str, Any]
    cases: Mapping[str, Case]


def effect(value: Any, **beside: Any) -> Case:
    return Case(EFFECT, value, beside)


def no_effect(value: Any, **beside: Any) -> Case:
    return Case(NO_EFFECT, value, beside)


def refused(value: Any, **beside: Any) -> Case:
    return Case(REFUSED, value, beside)


SAMPLING = {"temperature": effect(0.5), "top_p": effect(0.5)}
OF_OPENAI = {
    **SAMPLING,
    "frequency_penalty": effect(0.5),
    "presence_penalty": effect(0.5),
    "logit_bias": effect({"5": -1}),
    "max_tokens": effect(2),
    "model": refused("another"),
    "n": effect(2),
    "seed": effect(7),
    "stop": effect("Pa"),
    "stream": effect(True),
    "stream_options": effect({"include_usage": True}, stream=True),
    "user": no_effect("u"),
}
# Cheaper, sooner or counted by somebody: the same output.
STANDING = {
    "metadata": no_effect({"a": "b"}),
    "prompt_cache_key": no_effect("k"),
    "prompt_cache_options": no_effect({"mode": "explicit", "ttl": "30m"}),
    "prompt_cache_retention": no_effect("24h"),
    "safety_identifier": no_effect("s"),
    "service_tier": no_effect("flex"),
}
MODERATION = {"model": "omni-moderation-latest", "policy": {"output": {"mode": "block"}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHAT = {
    **OF_OPENAI,
    **STANDING,
    "messages": effect([{"role": "user", "content": "x"}]),
    "audio": refused({"voice": "alloy", "format": "wav"}),
    "function_call": refused({"name": "f"}),
    "functions": refused([FUNCTION]),
    "logprobs": effect(True),
    "max_completion_tokens": effect(2),
    "modalities": refused(["text", "audio"]),
    "moderation": refused(MODERATION),
    "parallel_tool_calls": effect(False, tools=TOOLS),
    "prediction": effect({"type": "content", "content": "Paris"}),
    "reasoning_effort": effect("none"),
    "response_format": effect({"type": "json_object"}),
    "store": no_effect(True),
    "tool_choice": effect("required", tools=TOOLS),
    "tools": effect(TOOLS),
    "top_logprobs": effect(2, logprobs=True),
    "verbosity": no_effect("low"),
    "web_search_options": refused({}),
}
COMPLETION = {
    **OF_OPENAI,
    "best_of": refused(3, n=2),
    "echo": effect(True),
    "logprobs": effect(1),
    "prompt": effect("x"),
    "suffix": effect("x"),
}
RESPONSE_TOOLS = [{"type": "function", **FUNCTION}]
RESPONSE = {
    **SAMPLING,
    **STANDING,
    "access_programs": no_effect({"cyber": "standard"}),
    "background": effect(True),
    "background_options": no_effect({"completion_window": "2h"}),
    "context_management": no_effect([{"type": "compaction", "compact_threshold": 1000}]),
    "conversation": refused("conv_1"),
    "image": no_effect({"context_compression": "enabled"}),
    "include": effect(["message.output_text.logprobs"]),
    "input": effect("x"),
    "instructions": effect("x"),
    "max_output_tokens": effect(2),
    "max_tool_calls": no_effect(1),
    "metadata": effect({"a": "b"}),
    "model": refused("another"),
    "moderation": refused(MODERATION),
    "parallel_tool_calls": effect(False, tools=RESPONSE_TOOLS),
    "previous_response_id": effect("resp_1"),
    "prompt": refused({"id": "pmpt_1"}),
    "reasoning": effect({"effort": "none"}),
    "store": effect(True),
    "stream": effect(True),
    "stream_options": no_effect({"include_obfuscation": False}, stream=True),
    "text": effect({"format": {"type": "json_object"}}),
    "tool_choice": effect("required", tools=RESPONSE_TOOLS),
    "tools": effect(RESPONSE_TOOLS),
    "top_logprobs": effect(2, include=["message.output_text.logprobs"]),
    "truncation": effect("auto"),
    "user": no_effect("u"),
}
MESSAGE_TOOLS = [{"name": "f", "input_schema": SCHEMA}]
COUNTED = {
    "betas": no_effect(["x"]),
    "billing_policy": no_effect({"type": "billing_policy", "bill_to": "self"}),
    "cache_control": no_effect({"type": "ephemeral"}),
    "compaction": no_effect({"type": "summary"}),
    "context_management": no_effect({"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "mcp_servers": refused([{"type": "url", "url": "http://x", "name": "x"}]),
    "messages": effect([{"role": "user", "content": "A longer question"}]),
    "model": refused("another"),
    "output_config": effect({"effort": "low"}),
    "speed": no_effect("fast"),
    "system": effect("x"),
    "thinking": no_effect({"type": "enabled", "budget_tokens": 1024}),
    "tool_choice": no_effect({"type": "any"}, tools=MESSAGE_TOOLS),
    "tools": effect(MESSAGE_TOOLS),
    "user_profile_id": no_effect("p"),
    "workspace_id": no_effect("w"),
}
MESSAGE = {
    **COUNTED,
    "compaction": refused({"type": "summary"}),
    "container": refused("c"),
    "diagnostics": no_effect({"previous_message_id": "msg_1"}),
    "fallback_credit_token": no_effect("t"),
    "fallbacks": no_effect([{"model": "another"}]),
    "inference_geo": refused("us"),
    "max_tokens": effect(2),
    "metadata": no_effect({"user_id": "u"}),
    "output_config": effect({"format": {"type": "json_schema", "schema": SCHEMA}}),
    "service_tier": no_effect("standard_only"),
    "stop_sequences": effect(["Pa"]),
    "stream": effect(True),
    "thinking": effect({"type": "enabled", "budget_tokens": 0}),
    "thread": refused({"type": "create"}),
    "tool_choice": effect({"type": "any"}, tools=MESSAGE_TOOLS),
    "tools": effect(MESSAGE_TOOLS),
}
USER = [{"role": "user", "content": "hi"}]
SURFACES = {
    "completions": Surface(
        "/v1/completions",
        (completion_create_params.CompletionCreateParamsNonStreaming,),
        {"prompt": "hi", "request_id": "r"},
        COMPLETION,
    ),
    "chat": Surface(
        "/v1/chat/completions",
        (chat_create_params.CompletionCreateParamsNonStreaming,),
        {"messages": USER, "request_id": "r"},
        CHAT,
    ),
    "responses": Surface(
        "/v1/responses",
        (response_create_params.ResponseCreateParamsNonStreaming,),
        {"input": "hi", "request_id": "r"},
        RESPONSE,
    ),
    "messages": Surface(
        "/v1/messages",
        (
            message_create_params.MessageCreateParamsNonStreaming,
            beta_message_create_params.MessageCreateParamsNonStreaming,
        ),
        {"messages": USER, "max_tokens": 50, "request_id": "r"},
        MESSAGE,
    ),
    "count_tokens": Surface(
        "/v1/messages/count_tokens",
        (
            message_count_tokens_params.MessageCountTokensParams,
            beta_count_tokens_params.MessageCountTokensParams,
        ),
        {"messages": USER},
        COUNTED,
    ),
}
# Fields whose effect needs a store of responses, or a tokenizer with tokens for gaps: without, the reason is said.
NEED_MORE = ("background", "previous_response_id", "store", "suffix")
CASES = [(surface, name) for surface, known in SURFACES.items() for name in known.cases]


def published(params: type) -> set[str]:
    return {name for kind in params.__mro__ for name in inspect.get_annotations(kind)}


@pytest.mark.parametrize("surface", SURFACES)
def test_every_published_field_is_decided(surface: str) -> None:
    known = {name for params in SURFACES[surface].params for name in published(params)}
    assert len(known) > 10
    assert SURFACES[surface].cases.keys() == known


async def seen(surface: Surface, body: Mapping[str, Any]) -> tuple[int, str, str]:
    """The status, the answer, and the request that the model gets."""
    service = service_of("<think>\nHm.\n</think>\n\nThe answer is Paris.")
    service.tokenizer = tokenizer_of(HERMES, TEMPLATE + "{{ reasoning_effort }}")
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.post(surface.path, json=body)
    return reply.status_code, reply.text, str(service.requests)


@pytest.mark.parametrize(("surface", "name"), CASES)
async def test_a_field_does_what_was_decided(surface: str, name: str) -> None:
    chosen = SURFACES[surface]
    case = chosen.cases[name]
    without = {**chosen.base, **case.beside}
    plain = await seen(chosen, without)
    status, text, request = await seen(chosen, {**without, name: case.value})
    assert plain[0] == 200, plain[1]
    if case.outcome == REFUSED:
        assert status in (400, 404), text
        assert name in text
    elif case.outcome == EFFECT:
        assert (status, text, request) != plain
        assert status == 200 or name in NEED_MORE, text
    else:
        assert (status, text, request) == plain
