"""Custom tools, whose input is one text: how they are called, what holds their grammar, and how histories show them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from gateway_script import ScriptedService
from hermes_service import service_of
from llguidance import LLMatcher, LLTokenizer
from responses_client import answer, events_of, openai_client, post
from tool_forms import HERMES
from tool_tokenizers import tokenizer_of

from outrider.gateway.responses.custom_grammar import custom_pattern
from outrider.gateway.responses.tools import custom_input
from outrider.gateway.servers.http.app import create_app
from outrider.shared.errors import InvalidRequest

# In the notation of Codex's patches, with all that such a grammar uses.
PATCH = r"""
start: begin hunk+ "*** End" LF?
begin: "*** Begin" LF
hunk: add | update  // two kinds
add: "*** Add: " filename LF add_line+ -> added
update: "*** Update: " filename LF (context | change)~1..3 [/!{2}/i LF]
filename: /(.+)/
add_line.2: "+" /(.*)/ LF
context: ("@@" | "@@ " /(.+)/) LF
change: ("+" | "-" | " ") /[^\n\/]*/
    LF

%import common.LF
%import common (WS, INT)
"""
GOOD = (
    "*** Begin\n*** Add: a.py\n+x = 1\n+\n*** End",
    "*** Begin\n*** Update: a\n@@ f\n-a\n+b\n!!\n*** Update: b\n c\n*** End\n",
)
BAD = ("", "*** Begin\n*** End", "*** Begin\n*** Add: \n+x\n*** End", "*** Begin\n*** Update: a\n-a/\n*** End")
TOOL: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
}
INPUT = '*** Begin\n*** Add: "a"\n+é\\n\n*** End'
CALL = "<tool_call>\n" + json.dumps({"name": "apply_patch", "arguments": {"input": INPUT}}) + "\n</tool_call>"


def said(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id", "status")}


@pytest.mark.parametrize("namespace", [None, "editor"])
async def test_a_call_is_an_item_with_a_text(namespace: str | None) -> None:
    tools = [TOOL] if namespace is None else [{"type": "namespace", "name": namespace, "tools": [TOOL]}]
    text = CALL if namespace is None else CALL.replace("apply_patch", f"{namespace}__apply_patch")
    names = {"name": "apply_patch"} | ({} if namespace is None else {"namespace": namespace})
    whole = await answer(service_of(text), tools=tools)
    (item,) = whole["output"]
    assert said(item) == {"type": "custom_tool_call", **names, "input": INPUT}
    assert item["id"].startswith("ctc_")
    for commit_len in (1, 1000):
        events = events_of(await post(service_of(text, commit_len), tools=tools, stream=True))
        kind = "response.custom_tool_call_input"
        assert "".join(event["delta"] for event in events if event["type"] == f"{kind}.delta") == INPUT
        assert [event["input"] for event in events if event["type"] == f"{kind}.done"] == [INPUT]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == [item]


async def test_openais_client_reads_it() -> None:
    async with openai_client(service_of(CALL)) as client:
        response = await client.responses.create(model="demo", input="x", tools=[TOOL], store=False)  # type: ignore[list-item]
    (item,) = response.output
    assert isinstance(item, openai.types.responses.ResponseCustomToolCall)
    assert item.input == INPUT


ARGUMENTS = [
    ('{"input": "a\\nb"}', "a\nb"),
    ('{"patch": "a"}', "a"),
    ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
    ('{"input": 5}', '{"input": 5}'),
    ("plain", "plain"),
    ('{"input": "a\\nb\\', "a\nb"),
    ('{"input": "a\\u00', "a"),
    ('{"input": "a\\ud83d', "a�"),
    ('{"input": "a\\ud83d"}', "a�"),
    ('{"inp', '{"inp'),
    ("[" * 100_000, "[" * 100_000),
]


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS, ids=[text[:20] for text, _ in ARGUMENTS])
def test_the_input_in_what_models_write(arguments: str, expected: str) -> None:
    assert custom_input(arguments) == expected
    assert expected.encode()


# ---- grammars ----


def accepted_by_engine(pattern: str, text: str) -> bool:
    """By llguidance, on bytes, within JSON."""
    tokenizer = LLTokenizer("byte")
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    return bool(matcher.consume_tokens(list(json.dumps(text, ensure_ascii=False).encode()))) and matcher.is_accepting()


def test_a_grammar_without_recursion_is_held() -> None:
    pattern = custom_pattern(TOOL["format"], "apply_patch")
    for text in GOOD:
        assert re.fullmatch(pattern, text)
        assert accepted_by_engine(pattern, text)
    for text in BAD:
        assert not re.fullmatch(pattern, text)
        assert not accepted_by_engine(pattern, text)


async def test_calls_follow_it_unasked() -> None:
    service = service_of(CALL)
    await answer(service, tools=[TOOL])
    grammar = service.requests[0].sampling_params.grammar
    assert grammar is not None
    assert "Begin" in grammar.text
    await answer(service, tools=[{**TOOL, "format": {"type": "text"}}])
    assert service.requests[1].sampling_params.grammar is None


DOUBLING = "start: r0 r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)) + '\nr40: "x"'
REFUSED = [
    ("start: a\na: b start\nb: /x/", "recurs in 'start'"),
    ("start: b", "has no rule 'b'"),
    ("start: (/a/", "unpaired '('"),
    ("start: /a/)", "unpaired ')'"),
    ("start: [/a/)", "unpaired"),
    ("start: * /a/", "behind nothing"),
    ("/a/", "which is no rule"),
    ("start: /a/\n%ignore WS", "what cannot be held within a call: '%ignore WS'"),
    ("start: WS2\n%import common.WS2", "imports 'WS2'"),
    ("start: " + "(" * 5000, "is nested too deep"),
    (DOUBLING, "has more than 65536 characters"),
    ("a" * 70_000, "has more than 65536 characters"),
]


@pytest.mark.parametrize(("definition", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_other_grammars_are_refused_by_the_tools_name(definition: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match="the grammar of 'f'") as refused:
        custom_pattern({"syntax": "lark", "definition": definition}, "f")
    assert message in refused.value.message


# ---- what agents send ----

CONVERSATION: list[dict[str, Any]] = [
    {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
    {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"role": "user", "content": "Go."},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "apply_patch", "input": 'a"b'},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    {"type": "local_shell_call", "id": "l", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c2", "output": "a.py"},
    {"type": "mcp_call", "id": "m1", "server_label": "s", "name": "look", "arguments": '{"q": 1}', "output": "found"},
    {"type": "compaction", "encrypted_content": "gAAA"},
    {"role": "user", "content": "More."},
]
STANDING: dict[str, Any] = {
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources", "new.kind"],
    "truncation": "auto",
    "text": {"verbosity": "low"},
    "reasoning": {"effort": None, "summary": "auto"},
    "prompt_cache_key": "k",
    "client_metadata": {"a": "b"},
    "context_management": [{"type": "compaction", "compact_threshold": 100_000}],
    "max_tool_calls": 20,
}


async def test_an_agents_history_and_its_standing_fields() -> None:
    service = service_of(CALL)
    template = (
        "{{ tools | map(attribute='function.name') | join }};{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %};"
        "{% endfor %}"
    )
    service.tokenizer = tokenizer_of(HERMES, template)
    whole = await answer(service, input=CONVERSATION, tools=[{"type": "web_search"}], **STANDING)
    assert said(whole["output"][0]) == {"type": "custom_tool_call", "name": "apply_patch", "input": INPUT}
    assert whole["truncation"] == "auto"
    assert service.tokenizer.decode(service.requests[0].prompt_token_ids) == (
        'apply_patch;system:Be brief.;user:Go.;assistant:(apply_patch {"input": "a\\"b"});tool:done;'
        'assistant:(local_shell {"type": "exec", "command": ["ls"]});tool:a.py;'
        'assistant:(look {"q": 1});tool:found;user:More.;'
    )


async def test_tools_of_an_earlier_turn_stay(service: ScriptedService) -> None:
    """`service` stores responses."""
    service.script.text = CALL
    service.tokenizer = tokenizer_of(HERMES, "{% for t in tools %}{{ t }}{% endfor %}{{ messages }}")
    first = await answer(service, input=CONVERSATION, tools=[], request_id="one")
    again = await answer(service, input="x", tools=[], previous_response_id=first["id"], request_id="two")
    assert again["output"][0]["type"] == "custom_tool_call"


async def test_references_to_stored_items(service: ScriptedService) -> None:
    first = await answer(service, request_id="one", tools=[])
    (message,) = first["output"]
    user = [{"role": "user", "content": text} for text in ("Weather?", "So?")]
    for reference in ({"type": "item_reference", "id": message["id"]}, {"id": message["id"]}):
        second = await answer(
            service, request_id=f"two-{len(reference)}", tools=[], input=[user[0], reference, user[1]]
        )
        prompt = service.tokenizer.decode(service.requests[-1].prompt_token_ids)
        assert prompt == "user:Weather?;assistant:Ok.;user:So?;"
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listed = (await client.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()["data"]
        assert [item["type"] for item in listed] == ["message"] * 3
        await client.delete(f"/v1/responses/{first['id']}")
    gone = await post(
        service, request_id="three", tools=[], input=[*user, {"type": "item_reference", "id": message["id"]}]
    )
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "input")
    assert "is not stored here" in gone.json()["error"]["message"]


async def test_references_cost_what_the_items_would(service: ScriptedService) -> None:
    service.script.text = "a" * 3000
    first = await answer(service, request_id="one", tools=[])
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    many = await post(service, request_id="two", tools=[], input=[reference] * 2000)
    assert many.status_code == 400
    assert "the items that are referred to have more than 4194304 bytes" in many.json()["error"]["message"]
