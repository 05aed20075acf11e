"""Chats with tools through the HTTP server: whole answers, streams and resumed streams say the same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from gateway_script import ScriptedService
from hermes_service import service_of
from tool_forms import HERMES
from tool_tokenizers import accepts, tokenizer_of

from outrider.gateway.request.record import SessionRecord, new_record
from outrider.gateway.servers.http.app import create_app

USER = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    "<think>\nTwo <b>calls</b>.\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
EXPECTED = [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]


async def post(service: ScriptedService, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        whole = {"messages": USER, "tools": TOOLS, "request_id": "r", **body}
        return await client.post("/v1/chat/completions", json=whole, headers=headers)


async def answer(service: ScriptedService, **body: Any) -> dict[str, Any]:
    response = await post(service, **body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Of each event its id and its data."""
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block.startswith("id:")]
    return [(block[0].removeprefix("id: "), json.loads(block[1].removeprefix("data: "))) for block in blocks]


def joined(response: httpx.Response) -> dict[str, Any]:
    """What a client makes of a stream's deltas."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
    for _, event in events_of(response):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            entries = delta.get("tool_calls", [])
            assert len({entry["index"] for entry in entries}) == len(entries), "one entry per call"
            for entry in entries:
                if entry["index"] == len(message["tool_calls"]):
                    assert entry["id"]
                    assert entry["type"] == "function"
                    assert entry["function"]["name"]
                    message["tool_calls"].append({"id": entry["id"], **entry["function"]})
                else:
                    assert entry.keys() == {"index", "function"}
                    assert entry["function"].keys() == {"arguments"}
                    message["tool_calls"][entry["index"]]["arguments"] += entry["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("commit_len", [1, 2, 5, 9, 1000])
async def test_whole_and_stream_say_the_same_at_every_commit_size(commit_len: int) -> None:
    choice = await answer(service_of(CALLS, commit_len))
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("Sure.", "Two <b>calls</b>.")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert (calls, choice["finish_reason"]) == (EXPECTED, "tool_calls")
    streamed = joined(await post(service_of(CALLS, commit_len), stream=True))
    assert (streamed["content"], streamed["reasoning"]) == (message["content"], message["reasoning"])
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == EXPECTED
    assert streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("body", [{}, {"parallel_tool_calls": False, "include_reasoning": False}])
async def test_another_gateway_goes_on_after_every_event_with_the_same_bytes(body: dict[str, Any]) -> None:
    """It has the tokens, and of the request what is in its record."""
    service = service_of(CALLS, 2)
    first = await post(service, stream=True, **body)
    blocks = [block for block in first.text.split("\n\n") if block]
    events = events_of(first)
    ((answer_id, (kind, prepared)),) = service.begun.items()
    recorded = SessionRecord.decode(new_record(kind, prepared).encode())
    for place, (event_id, _) in enumerate(events):
        other = service_of(CALLS, 2, tool_call_parser="none", reasoning_parser="none")
        other.begun[answer_id] = recorded.kind, recorded.prepared
        rest = await post(other, headers={"last-event-id": event_id}, stream=True)
        assert [block for block in rest.text.split("\n\n") if block] == blocks[place + 1 :], event_id


async def test_ids_depend_on_the_request_alone() -> None:
    service = service_of(CALLS)
    first = await post(service, stream=True)
    again = await post(service, headers={"last-event-id": events_of(first)[0][0]}, stream=True)
    ids = [call["id"] for call in joined(first)["tool_calls"]]
    assert ids == [call["id"] for call in joined(again)["tool_calls"]]
    assert len(set(ids)) == 2


FINISHES: list[tuple[dict[str, Any], str]] = [
    ({}, "tool_calls"),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "stop"),
    ({"tool_choice": "required"}, "tool_calls"),
    ({"max_tokens": 90}, "length"),
    ({"stop": ["Zürich"]}, "stop"),
    ({"stop": ["</tool_call>"]}, "stop"),
]


@pytest.mark.parametrize(("body", "reason"), FINISHES)
async def test_finish_reasons(body: dict[str, Any], reason: str) -> None:
    choice = await answer(service_of(CALLS), **body)
    assert choice["finish_reason"] == reason
    assert joined(await post(service_of(CALLS), stream=True, **body))["finish_reason"] == reason
    if body.get("stop"):
        assert choice["stop_reason"] == body["stop"][0]


@pytest.mark.parametrize("body", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}])
async def test_parallel_tool_calls_false_ends_the_output_with_its_call(body: dict[str, Any]) -> None:
    service = service_of(f"{CALLS} And so on, up to max_tokens.")
    choice = await answer(service, parallel_tool_calls=False, return_token_ids=True, **body)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        "Sure.",
        "tool_calls",
        None,
    )
    written = service.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
    assert written == CALLS[: CALLS.index("}}") + 2]


async def test_parallel_tool_calls_false_means_nothing_without_calls() -> None:
    for body in ({"tools": []}, {"tool_choice": "none"}):
        both = [await answer(service_of(CALLS), parallel_tool_calls=parallel, **body) for parallel in (False, True)]
        assert both[0] == both[1]


async def test_without_tools_or_with_choice_none_markup_is_text() -> None:
    for body in ({"tools": []}, {"tool_choice": "none"}):
        message = (await answer(service_of(CALLS), **body))["message"]
        assert "tool_calls" not in message
        assert message["reasoning"] == "Two <b>calls</b>."
        assert message["content"].startswith("Sure.\n<tool_call>\n{") or message["content"].startswith("Sure.\n\n{")


async def test_reasoning_can_be_left_out_or_renamed_and_is_counted() -> None:
    response = (await post(service_of(CALLS), include_reasoning=False)).json()
    assert response["choices"][0]["message"]["reasoning"] is None
    tokens = len(tokenizer_of(HERMES).encode(CALLS[: CALLS.index("</think>") + 8], add_special_tokens=False))
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
    renamed = await answer(service_of(CALLS, reasoning_field="reasoning_content"))
    assert renamed["message"]["reasoning_content"] == "Two <b>calls</b>."
    streamed = await post(service_of(CALLS), stream=True, stream_options={"include_usage": True})
    assert events_of(streamed)[-1][1]["usage"] == response["usage"]


async def test_a_model_that_reasons_has_the_field_in_every_message() -> None:
    """openai's client knows a field of vLLM's only where the answer has it, and refuses to read another."""
    silent = await post(service_of("No call."), stream=False)
    assert openai.types.chat.ChatCompletion(**silent.json()).choices[0].message.model_extra == {"reasoning": None}
    assert "reasoning" not in (await answer(service_of("No call.", reasoning_parser="none")))["message"]
    asked = [*USER, silent.json()["choices"][0]["message"], *USER]
    assert (await answer(service_of("Yes."), messages=asked))["message"]["content"] == "Yes."


async def test_tools_and_past_calls_reach_the_template() -> None:
    service = service_of("Ok.")
    template = (
        "{{ tools[0].function.name }};{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}"
        "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments.city }} {{ c.id }}){% endfor %};"
        "{% endfor %}{{ reasoning_effort }} {{ enable_thinking }}"
    )
    service.tokenizer = tokenizer_of(HERMES, template)
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": '{"cit'}}
    messages = [
        {"role": "system", "content": "A."},
        {"role": "developer", "content": "B."},
        *USER,
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await answer(service, messages=messages, reasoning_effort="low")
    assert service.tokenizer.decode(service.requests[0].prompt_token_ids) == (
        "get_weather;system:A.\n\nB.;user:Weather?;assistant:Hm.(get_weather Bern c1)(now  c2);tool:rain;low True"
    )


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "entry 0 has type 'custom'; only function"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "more than one function of the name 'now'"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools",
        "function.name must be 1 to 128",
    ),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x', which is not among"),
    ({"tool_choice": "maybe"}, "tool_choice", "must be one of none, auto, required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "must have a tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages.0.tool_calls.0",
        "must have a function with a name",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
async def test_refusals(body: dict[str, Any], param: str, message: str) -> None:
    response = await post(service_of(CALLS), **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_tokenize_counts_the_tools_too() -> None:
    transport = httpx.ASGITransport(app=create_app(service_of("")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        bare, full = [
            (await client.post("/tokenize", json={"messages": USER, **further})).json()["count"]
            for further in ({}, {"tools": TOOLS})
        ]
    assert full > bare + 50


async def test_a_model_whose_form_of_calls_is_not_known() -> None:
    service = service_of(CALLS, tool_call_parser="none")
    assert "not known; start the gateway with --tool-call-parser" in (await post(service)).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "none", "response_format": {"type": "text"}}, False),
    ],
)
async def test_a_grammar_only_where_one_is_needed(body: dict[str, Any], has_grammar: bool) -> None:
    service = service_of(CALLS)
    await answer(service, **body)
    assert (service.requests[0].sampling_params.grammar is not None) == has_grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_format_says_nothing_of_a_call_that_is_demanded(choice: Any) -> None:
    """It is of the text, and there is none: as OpenAI's and vLLM's, and what agents with typed outputs send."""
    service = service_of(CALLS)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for body in ({}, {"response_format": response_format}):
        await answer(service, tool_choice=choice, **body)
    plain, formatted = (request.sampling_params.grammar for request in service.requests)
    assert plain is not None
    assert plain == formatted


@pytest.mark.parametrize(
    ("choice", "num_calls"), [("required", 2), ({"type": "function", "function": {"name": "now"}}, 1)]
)
async def test_a_function_that_is_named_is_called_once(choice: Any, num_calls: int) -> None:
    """As OpenAI's and vLLM's: a model that could go on calling it might never end."""
    service = service_of(CALLS)
    await answer(service, tool_choice=choice)
    grammar = service.requests[-1].sampling_params.grammar
    assert grammar is not None
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    accepted = [accepts(grammar, HERMES, "\n".join([call] * count)) for count in (1, 2)]
    assert accepted == [True, num_calls == 2]
