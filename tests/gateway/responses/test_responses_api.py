"""POST /v1/responses, whole answers: what is asked, how it is answered, what is refused by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from hermes_service import service_of
from openai.types.responses import Response
from responses_client import CALLS, PARAMETERS, TOOLS, answer, openai_client, post
from tool_forms import HERMES
from tool_tokenizers import tokenizer_of

from outrider.gateway.admission.auth import Admission
from outrider.gateway.request.served import RequestLimits
from outrider.shared.api_keys import KeyRing, key_line

TEMPLATE = (
    "{{ tools[0].function.name if tools }};{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}|{{ m.reasoning_content }}"
    "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments.city }} {{ c.id }}){% endfor %};"
    "{% endfor %}{{ reasoning_effort }}"
)


async def test_the_items_stand_in_the_order_in_which_the_model_wrote_them() -> None:
    whole = await answer(service_of(CALLS), metadata={"a": "b"}, instructions="Be brief.")
    Response.model_validate(whole)
    reasoning, sure, weather, and_, now = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Two <b>calls</b>."}]
    assert [item["content"][0]["text"] for item in (sure, and_)] == ["Sure, 漢字.", "And:"]
    calls = [(item["type"], item["name"], item["arguments"], item["status"]) for item in (weather, now)]
    assert calls == [
        ("function_call", "get_weather", '{"city": "Zürich"}', "completed"),
        ("function_call", "now", "{}", "completed"),
    ]
    assert len({item["id"] for item in whole["output"]} | {weather["call_id"], now["call_id"]}) == 7
    assert (whole["id"], whole["status"], whole["metadata"]) == ("resp_r", "completed", {"a": "b"})
    assert whole["instructions"] == "Be brief."
    usage = whole["usage"]
    tokens = len(tokenizer_of(HERMES).encode(CALLS[: CALLS.index("</think>") + 8], add_special_tokens=False))
    assert usage["output_tokens_details"] == {"reasoning_tokens": tokens}
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert whole["metrics"]["speculative_decoding"]["num_spec_steps"] == 4


async def test_built_in_tools_are_not_shown_and_namespaces_are() -> None:
    """As Codex sends them, unasked."""
    names = {"type": "namespace", "name": "geo", "tools": [TOOLS[0]]}
    built_in = [{"type": "web_search_preview"}, {"type": "local_shell"}, {"type": "code_interpreter", "container": {}}]
    service = service_of('<tool_call>\n{"name": "geo__get_weather", "arguments": {"city": "Bern"}}\n</tool_call>')
    whole = await answer(service, tools=[*built_in, names, TOOLS[1]])
    prompt = service.tokenizer.decode(service.requests[-1].prompt_token_ids)
    assert '"geo__get_weather"' in prompt
    assert "shell" not in prompt
    assert [tool["type"] for tool in whole["tools"]] == ["namespace", "function"]
    (call,) = whole["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("geo", "get_weather", '{"city": "Bern"}')
    service.tokenizer = tokenizer_of(HERMES, TEMPLATE)
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
    await answer(service, input=[{"role": "user", "content": "Weather?"}, call, output], tools=[names])
    assert "(geo__get_weather Bern" in service.tokenizer.decode(service.requests[-1].prompt_token_ids)
    assert (await answer(service, tools=built_in))["tools"] == []


async def test_how_a_function_gets_to_the_model_is_not_shown_to_it() -> None:
    service = service_of("Ok.")
    await answer(service, tools=[TOOLS[0]])
    await answer(service, tools=[{**TOOLS[0], "defer_loading": True, "allowed_callers": ["direct", "programmatic"]}])
    plain, deferred = service.requests
    assert deferred.prompt_token_ids == plain.prompt_token_ids


async def test_a_conversation_in_items_is_the_prompt_of_the_same_chat() -> None:
    service = service_of("Ok.")
    service.tokenizer = tokenizer_of(HERMES, TEMPLATE)
    items = [
        {"role": "developer", "content": "B."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"cit'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": "At noon."},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
    ]
    await answer(service, input=items, instructions="A.", reasoning={"effort": "low", "summary": "auto"})
    assert service.tokenizer.decode(service.requests[0].prompt_token_ids) == (
        "get_weather;system:A.\n\nB.|;user:Weather?|;assistant:Wait.|Hm.(get_weather Bern c1)(now  c2);tool:rain|;"
        "tool:noon|;assistant:Rain.|;assistant:At noon.|;low"
    )


async def test_an_answers_items_can_be_sent_back_as_they_are() -> None:
    service = service_of(CALLS)
    output = (await answer(service))["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        for item in output
        if item["type"] == "function_call"
    ]
    service.tokenizer = tokenizer_of(HERMES, TEMPLATE)
    await answer(service, input=[{"role": "user", "content": "Weather?"}, *output, *results], request_id="s")
    ids = [item["call_id"] for item in results]
    assert service.tokenizer.decode(service.requests[1].prompt_token_ids) == (
        "get_weather;user:Weather?|;assistant:Sure, 漢字.And:|Two <b>calls</b>."
        f"(get_weather Zürich {ids[0]})(now  {ids[1]});tool:x|;tool:x|;"
    )


async def test_sampling_and_speculation_fields_reach_the_request() -> None:
    service = service_of("Ok.", draft_methods=("ngram",))
    await answer(
        service,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        max_output_tokens=11,
        logit_bias={"5": -1},
        structured_outputs={"json": PARAMETERS},
        speculation={"method": "ngram", "num_speculative_tokens": 4},
    )
    [request] = service.requests
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert (params.max_tokens, params.logit_bias) == (11, ((5, -1.0),))
    assert params.grammar is not None
    assert '"city"' in params.grammar.text
    assert (request.speculation.method, request.speculation.num_speculative_tokens) == ("ngram", 4)


async def test_logprobs_are_those_of_the_texts_tokens() -> None:
    text = "<think>\nHm.\n</think>\n\nSure, 漢字."
    whole = await answer(service_of(text), include=["message.output_text.logprobs"], top_logprobs=2)
    [_, message] = whole["output"]
    logprobs = message["content"][0]["logprobs"]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode().strip() == "Sure, 漢字."
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert (await answer(service_of(text)))["output"][1]["content"][0]["logprobs"] == []


SCHEMA = {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}


@pytest.mark.parametrize(
    ("body", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "name": "now"}}, True),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOLS[1]]}}, True),
        ({"tools": [{**TOOLS[0], "strict": True}]}, True),
        ({"text": {"format": {"type": "json_object"}}}, True),
        ({"text": {"format": SCHEMA}}, True),
        ({"text": {"format": {"type": "text"}}}, False),
    ],
)
async def test_a_grammar_only_where_one_is_needed(body: dict[str, Any], has_grammar: bool) -> None:
    service = service_of(CALLS)
    await answer(service, **body)
    assert (service.requests[0].sampling_params.grammar is not None) == has_grammar


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "entry 0 has type 'mcp'; only function"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools", "a namespace must have a name and a list of tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice must be one of"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "entry 0: name must be 1 to 128"),
    ({"tools": [{**TOOLS[0], "allowed_callers": ["programmatic"]}]}, "tools", "'get_weather': allowed_callers without"),
    ({"tools": [{**TOOLS[0], "allowed_callers": 5}]}, "tools", "'get_weather': allowed_callers without direct is not"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "names 'x', which is not among"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type 'xml' is not one of"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format.schema must be an object"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort must be one of"),
    ({"max_output_tokens": 100_000}, "max_output_tokens", "max_output_tokens is 100000"),
    ({"input": []}, "input", "input must not be empty"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "this gateway stores no responses"),
    ({"input": [{"type": "compaction_trigger"}]}, "input", "entry 0 has type 'compaction_trigger', which is not"),
    (
        {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input",
        "entry 0: output part 0 has type 'input_image'; only text is supported",
    ),
    (
        {
            "tools": [
                {
                    "type": "custom",
                    "name": "x",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: (start)"},
                }
            ]
        },
        "tools",
        "the grammar of 'x' recurs in 'start'",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "entry 0: content part 0 has type 'input_image'; only text is supported",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "entry 0 must have a call_id"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "entry 0: role must be one of user, assistant"),
    ({"metadata": {"a": 1}}, "metadata", "which 'a' has not"),
    (
        {"background": True},
        "background",
        "only be used when `store` is true: start the gateway with --stored-response-ttl-s",
    ),
    ({"store": True}, "store", "start it with --stored-response-ttl-s, or send false"),
    ({"previous_response_id": "x"}, "previous_response_id", "this gateway stores no responses"),
    ({"conversation": "c"}, "conversation", "conversation is not supported"),
    ({"enable_response_messages": True}, "enable_response_messages", "enable_response_messages is not supported"),
    ({"previous_input_messages": []}, "previous_input_messages", "previous_input_messages is not supported"),
    ({"max_tokens": 5}, "max_tokens", "max_tokens is not supported; use max_output_tokens"),
    ({"messages": []}, "messages", "messages is not supported; use input"),
    ({"stop": ["x"]}, "stop", "stop is not supported"),
    ({"speculation": {"annotate": True}}, "speculation", "use /v1/chat/completions"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
async def test_refusals_name_the_field_as_it_is_called_here(body: dict[str, Any], param: str, message: str) -> None:
    response = await post(service_of(CALLS), **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


async def test_unknown_fields_are_ignored_and_a_wrong_model_is_not() -> None:
    await answer(
        service_of("Ok."), client_metadata={"x": 1}, max_tool_calls=3, stream_options={"include_obfuscation": 1}
    )
    response = await post(service_of("Ok."), model="other")
    assert response.status_code == 404


async def test_a_keys_tokens_and_the_bodys_bytes_are_bounded_as_in_a_chat(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("ann", "or-ann", tokens_per_minute=50) + "\n")
    service = service_of("Ok.", 1)
    service.limits = RequestLimits(max_body_bytes=2000)
    async with openai_client(service, "or-ann", Admission(ring=KeyRing(str(keys)))) as ann:
        with pytest.raises(openai.APIStatusError) as refused:
            await ann.responses.create(input="x" * 2000)
        assert refused.value.status_code == 413
        await ann.responses.create(input="x" * 200)
        with pytest.raises(openai.RateLimitError, match="has used its 50 tokens per minute"):
            await ann.responses.create(input="x")
    async with openai_client(service, "or-bob", Admission(ring=KeyRing(str(keys)))) as bob:
        with pytest.raises(openai.AuthenticationError):
            await bob.responses.create(input="x")
