"""Messages through the HTTP server: events depend on the tokens alone, and the whole message is what they add up to."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService
from hermes_service import service_of
from tool_forms import HERMES
from tool_tokenizers import tokenizer_of

from outrider.gateway.request.record import SessionRecord, new_record
from outrider.gateway.servers.http.app import create_app
from outrider.shared.errors import VerifierLost
from outrider.shared.sampling_params import GrammarKind

USER = [{"role": "user", "content": "Weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
CALLS = (
    "<think>\nTwo <b>calls</b>.\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    'And 漢字:\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THINKING = {"type": "thinking", "thinking": "Two <b>calls</b>.", "signature": ""}
CONTENT: list[dict[str, Any]] = [
    THINKING,
    {"type": "text", "text": "Sure."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich"}},
    {"type": "text", "text": "And 漢字:"},
    {"type": "tool_use", "name": "now", "input": {}},
]
BODIES: list[dict[str, Any]] = [
    {},
    {"tools": []},
    {"max_tokens": 90},
    {"stop_sequences": ["Zürich", "</tool_call>"]},
    {"stop_sequences": ["ure.\nX", "漢字"], "thinking": {"type": "adaptive", "display": "omitted"}},
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
]


async def post(
    service: ScriptedService, path: str = "", headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        required = {} if path else {"max_tokens": 600, "request_id": "r"}
        whole = {"model": "demo", "messages": USER, "tools": TOOLS, **required, **body}
        return await client.post(f"/v1/messages{path}", json=whole, headers=headers)


async def answer(service: ScriptedService, **body: Any) -> dict[str, Any]:
    response = await post(service, **body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        ident, name, data = block.split("\n")
        assert ident.startswith("id: msg_r:")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, by Anthropic's description of it."""
    first, ping, *middle, ending, last = events
    assert [event["type"] for event in (first, ping, last)] == ["message_start", "ping", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                blocks[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                blocks[-1]["thinking"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                blocks[-1]["json"] += text
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text)
            except ValueError:
                block["input"] = {}
    return {**first["message"], "content": blocks, **ending["delta"], "usage": ending["usage"]}


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.mark.parametrize("body", BODIES)
async def test_events_depend_on_the_tokens_alone(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, whatever commits the tokens came in; and they add up to the whole message."""
    monkeypatch.setattr("time.time", lambda: 1.0)
    one_by_one = await post(service_of(CALLS, commit_len=1), stream=True, **body)
    for commit_len in (2, 3, 5, 9, 1000):
        assert (await post(service_of(CALLS, commit_len=commit_len), stream=True, **body)).text == one_by_one.text
        assert folded(events_of(one_by_one)) == await answer(service_of(CALLS, commit_len=commit_len), **body)


async def test_blocks_come_in_the_order_in_which_the_model_wrote_them() -> None:
    message = await answer(service_of(CALLS))
    assert without_ids(message["content"]) == CONTENT
    assert message.keys() >= {"id", "type", "role", "model", "stop_reason", "stop_sequence", "usage"}
    assert (message["id"], message["role"], message["stop_reason"]) == ("msg_r", "assistant", "tool_use")
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2
    assert all(ident.startswith("toolu_") for ident in ids)


async def test_usage_counts_the_cached_part_of_the_prompt_apart() -> None:
    service = service_of(CALLS)
    usage = (await answer(service))["usage"]
    prompt_len = len(service.requests[0].prompt_token_ids)
    num_tokens = len(tokenizer_of(HERMES).encode(CALLS, add_special_tokens=False))
    num_thinking = len(tokenizer_of(HERMES).encode(CALLS[: CALLS.index("</think>") + 8], add_special_tokens=False))
    assert usage == {
        "input_tokens": prompt_len - 2,  # the script's verifier has two in its cache
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": num_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }
    start = events_of(await post(service_of(CALLS), stream=True))[0]["message"]
    del usage["output_tokens_details"]
    assert start["usage"] == {**usage, "output_tokens": 0}


STOPS: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "tool_use", None),
    ({"tool_choice": {"type": "tool", "name": "now"}}, "tool_use", None),
    ({"tools": []}, "end_turn", None),
    ({"tool_choice": {"type": "none"}}, "end_turn", None),
    ({"max_tokens": 90}, "max_tokens", None),
    ({"stop_sequences": ["nope", "Zürich"]}, "stop_sequence", "Zürich"),
]


@pytest.mark.parametrize(("body", "reason", "sequence"), STOPS)
async def test_stop_reasons(body: dict[str, Any], reason: str, sequence: str | None) -> None:
    message = await answer(service_of(CALLS), **body)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_a_call_that_is_cut_has_an_empty_input() -> None:
    num_tokens = len(service_of(CALLS).tokenizer.encode(CALLS.partition("rich")[0], add_special_tokens=False))
    message = await answer(service_of(CALLS), max_tokens=num_tokens)
    assert message["stop_reason"] == "max_tokens"
    assert without_ids(message["content"])[-1] == {"type": "tool_use", "name": "get_weather", "input": {}}


async def test_a_call_that_a_stop_sequence_ends_is_whole() -> None:
    message = await answer(service_of(CALLS), stop_sequences=["rich"])
    assert message["stop_reason"] == "stop_sequence"
    assert without_ids(message["content"])[-1]["input"] == {"city": "Zü"}


@pytest.mark.parametrize("body", BODIES)
async def test_another_gateway_goes_on_after_every_event_with_the_same_bytes(body: dict[str, Any]) -> None:
    """It has the tokens, and of the request what is in its record."""
    service = service_of(CALLS)
    first = await post(service, stream=True, **body)
    blocks = [f"{block}\n\n" for block in first.text.split("\n\n")[:-1]]
    ((answer_id, (kind, prepared)),) = service.begun.items()
    recorded = SessionRecord.decode(new_record(kind, prepared).encode())
    for place, block in enumerate(blocks):
        other = service_of(CALLS, commit_len=4, tool_call_parser="none", reasoning_parser="none")
        other.begun[answer_id] = recorded.kind, recorded.prepared
        event_id = block.split("\n")[0].removeprefix("id: ")
        rest = await post(other, headers={"last-event-id": event_id})
        assert rest.text == "".join(blocks[place + 1 :]), event_id


async def test_the_route_of_streams_has_all_of_it() -> None:
    service = service_of(CALLS)
    first = await post(service, stream=True)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/v1/streams/msg_r")).text == first.text


async def test_the_conversation_reaches_the_template() -> None:
    service = service_of("Ok.")
    template = (
        "{{ tools[0].function.name }} {{ tools[0].function.parameters.required }};{% for m in messages %}{{ m.role }}:"
        "{{ m.content }}{{ m.reasoning_content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments.city }} {{ c.id }}){% endfor %};"
        "{% endfor %}{{ reasoning_effort }} {{ enable_thinking }}"
    )
    service.tokenizer = tokenizer_of(HERMES, template)
    messages = [
        *USER,
        {"role": "user", "content": [{"type": "text", "text": "Bern.", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "So?"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "none", "is_error": True},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "A."}]
    fields: dict[str, Any] = {
        "messages": messages,
        "system": system,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }
    await answer(service, **fields)
    expected = (
        "get_weather ['city'];system:A.;user:Weather?\nBern.;assistant:Look:Hm.(get_weather Bern c1);"
        "tool:rainc1;tool:Error: nonec2;user:So?;low True"
    )
    prompt = service.requests[0].prompt_token_ids
    assert service.tokenizer.decode(prompt) == expected
    assert (await post(service, "/count_tokens", **fields)).json() == {"input_tokens": len(prompt)}


async def test_a_final_assistant_message_is_continued() -> None:
    service = service_of("Ok.")
    await answer(service, messages=[*USER, {"role": "assistant", "content": "It is"}], tools=[])
    assert service.tokenizer.decode(service.requests[0].prompt_token_ids).endswith("<|assistant|>It is")


async def test_sampling_fields_are_those_of_a_chat() -> None:
    service = service_of("Ok.")
    await answer(service, temperature=0.5, top_p=0.9, top_k=7, seed=3, speculation={"method": "off"})
    request = service.requests[0]
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert (params.max_tokens, request.speculation.method) == (600, "off")


@pytest.mark.parametrize(
    ("body", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": {"type": "any"}}, True),
        ({"tool_choice": {"type": "tool", "name": "now"}}, True),
        ({"tools": [{**TOOLS[0], "strict": True, "type": "custom"}]}, True),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, True),
        ({"tool_choice": {"type": "none"}}, False),
    ],
)
async def test_a_grammar_only_where_one_is_needed(body: dict[str, Any], has_grammar: bool) -> None:
    service = service_of(CALLS)
    await answer(service, **body)
    grammar = service.requests[0].sampling_params.grammar
    assert (grammar is not None and grammar.kind is GrammarKind.LARK) == has_grammar


def of_block(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages entry 0 must have one of the roles user, assistant"),
    ({"messages": [{"role": "user"}]}, "messages entry 0 must have text or a list of blocks as content, got null"),
    (of_block({"type": "image", "source": {}}), "messages entry 0 block 0 has type 'image'; only text, tool_result"),
    (
        of_block({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
        "messages entry 0 block 0 block 0 has type 'image'; only text can be read here",
    ),
    (of_block({"type": "tool_use", "id": "c", "name": "f"}), "entry 0 block 0 has type 'tool_use'"),
    (of_block({"type": "tool_use", "id": "c", "name": "f"}, "assistant"), "last tool_use has no tool_result after it"),
    (of_block({"type": "tool_use", "name": "f"}, "assistant"), "block 0 must have a string as id, got null"),
    ({"system": 5}, "system must have text or a list of blocks as content, got a number"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "entry 0 has type 'web_search_20250305'",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "entry 0 has type 'bash_20250124'; only custom tools"),
    ({"tools": [{**TOOLS[1], "defer_loading": True}]}, "tools entry 0: defer_loading is not supported"),
    ({"tools": [{"name": "now"}]}, "tools entry 0 must have an object as input_schema, got null"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools has more than one function of the name 'now'"),
    ({"tool_choice": "auto"}, "tool_choice must be an object whose type is one of auto, any, tool, none"),
    ({"tool_choice": {"type": ["auto"]}}, "tool_choice must be an object whose type is one of auto, any, tool, none"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice .name must be a string, got null"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x', which is not among tools"),
    ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use must be true or"),
    ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"thinking": {"type": "on"}}, "thinking.type must be one of enabled, adaptive, disabled"),
    ({"thinking": {"type": "disabled"}}, "chat template cannot turn it off"),
    ({"stop_sequences": [""]}, "stop_sequences must not contain an empty string"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "entry 0 has type 'compact_20260112'; only"),
    ({"container": "c"}, "container is not supported"),
    ({"output_format": {"type": "json_schema"}}, "output_format is not supported; use output_config.format"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be"),
    ({"output_config": {"task_budget": {"total": 5}}}, "task_budget is not supported"),
    ({"speculation": {"annotate": True}}, "speculation.annotate is not supported; use /v1/chat/completions"),
    ({"temperature": -1}, "temperature"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
async def test_refusals_name_the_field_in_anthropics_form(body: dict[str, Any], message: str) -> None:
    response = await post(service_of(CALLS), **body)
    assert response.status_code == 400
    error = response.json()
    assert error.keys() == {"type", "error"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]


async def test_a_model_that_does_not_think() -> None:
    """Clients ask for it whatever the model; its template is not made to begin a thought that nothing would read."""
    service = service_of("Ok.", reasoning_parser="none")
    service.tokenizer = tokenizer_of(HERMES, "{{ messages[0].content }} {{ enable_thinking }}")
    for kind, expected in (("enabled", "Weather? "), ("adaptive", "Weather? "), ("disabled", "Weather? False")):
        await answer(service, thinking={"type": kind, "budget_tokens": 1024}, tools=[])
        assert service.tokenizer.decode(service.requests[-1].prompt_token_ids) == expected


async def test_max_tokens_beyond_the_room_is_cut_and_said() -> None:
    service = service_of("a" * 9000)
    message = await answer(service, max_tokens=32_000, tools=[])
    assert (message["stop_reason"], message["stop_sequence"]) == ("model_context_window_exceeded", None)
    assert (
        message["usage"]["input_tokens"]
        + message["usage"]["cache_read_input_tokens"]
        + message["usage"]["output_tokens"]
        == 4096
    )
    assert (await answer(service, max_tokens=9, tools=[]))["stop_reason"] == "max_tokens"
    assert (await answer(service_of("Ok."), max_tokens=32_000))["stop_reason"] == "end_turn"


async def test_a_prompt_beyond_the_context_is_refused_in_anthropics_words() -> None:
    """Claude Code compacts its conversation when it reads them, and takes the numbers."""
    for length in (5000, 100_000):
        refused = await post(service_of("Ok."), messages=[{"role": "user", "content": "a" * length}], tools=[])
        said = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", refused.json()["error"]["message"])
        assert said is not None
        assert int(said[1]) > int(said[2]) == 4096


async def test_any_number_of_tools_that_fits() -> None:
    schema = {"type": "object", "properties": {}}
    tools = [{"name": f"mcp__{number:0122d}a", "input_schema": schema} for number in range(300)]
    service = service_of(f'<tool_call>\n{{"name": "{tools[299]["name"]}", "arguments": {{}}}}\n</tool_call>')
    service.tokenizer = tokenizer_of(HERMES, "{% for t in tools %}.{% endfor %}{{ messages[0].content }}")
    message = await answer(service, tools=tools)
    assert without_ids(message["content"]) == [{"type": "tool_use", "name": tools[299]["name"], "input": {}}]
    refused = await post(service, tools=[{"name": "a" * 129, "input_schema": schema}])
    assert "function.name must be 1 to 128 letters" in refused.json()["error"]["message"]


async def test_errors_have_anthropics_types() -> None:
    unknown = await post(service_of(CALLS), model="claude")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    transport = httpx.ASGITransport(app=create_app(service_of(CALLS)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        wrong_method = await client.get("/v1/messages")
        elsewhere = await client.get("/v1/chat/completions")
    assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"
    assert "param" in elsewhere.json()["error"]
    service = service_of(CALLS)
    service.script = Script(CALLS, error=VerifierLost("the verifier is gone"), error_at=2)
    stream = (await post(service, stream=True)).text
    assert stream.endswith(
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"the verifier is gone"}}\n\n'
    )


async def test_an_output_that_ends_early_is_no_message() -> None:
    service = service_of(CALLS)
    service.script = Script(CALLS, ends_early=True)
    assert (await post(service)).json()["error"]["type"] == "api_error"
    assert "message_stop" not in (await post(service, stream=True)).text
