"""Whole sessions in the shape that Claude Code 2.1 sends: every request is answered, and each prompt goes on where the
one before it ended, so that a prefix cache holds all but what is new.

The fields are those that it sends to any server, of its documented API; the texts are ours.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService
from hermes_service import service_of
from tool_forms import HERMES
from tool_tokenizers import tokenizer_of

from outrider.gateway.servers.http.app import create_app

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
REMINDER = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"}
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
    {"type": "text", "text": "You are an agent.", **EPHEMERAL},
    {"type": "text", "text": "Mend what the user asks for.", **EPHEMERAL},
]
PATH = {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "Read", "description": "Reads a file.", "input_schema": {"$schema": "x", **PATH}},
    {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {"command": {}}}},
    {
        "name": f"mcp__{'server_' * 14}search",
        "description": "Looks.",
        "input_schema": PATH,
        "eager_input_streaming": True,
    },
    *({"name": f"Task{number}", "input_schema": {"type": "object", "properties": {}}} for number in range(150)),
]
STANDING: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32_000,
    "system": SYSTEM,
    "tools": [*TOOLS[:-1], {**TOOLS[-1], **EPHEMERAL}],
    "metadata": {"user_id": '{"device_id":"0","session_id":"0"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
AGENTS = {"role": "system", "content": "Agents: none."}
READ = (
    "<think>\nFirst read it.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/a.py"}}\n</tool_call>'
)
TWO = READ + '\n<tool_call>\n{"name": "Bash", "arguments": {"command": "pytest"}}\n</tool_call>'
DONE = "<think>\nGood.\n</think>\n\nDone."
# Shows later system messages as Qwen3.5's does not; and all that a prompt is made of.
TURNS = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %};{% endfor %}"
    "{% if enable_thinking %}{% endif %}{% for t in tools or [] %}{% endfor %}"
)
FIRST_ONLY = (
    "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('first') }}{% endif %}"
)


class Session:
    """One conversation, as the client keeps it. prompts: of its requests, as text."""

    def __init__(self, service: ScriptedService) -> None:
        self.service = service
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=create_app(service)),
            base_url="http://test/v1",
            params={"beta": "true"},
            headers={"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "context-management"},
        )
        self.messages: list[dict[str, Any]] = []
        self.prompts: list[str] = []

    async def turn(self, says: str, *content: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """The user's next message; what the model says to it joins the conversation."""
        self.messages.append({"role": "user", "content": [*content]})
        if len(self.messages) == 1:
            self.messages.append(AGENTS)
        self.service.script = Script(says, commit_len=3)
        body = {**STANDING, "messages": self._marked(), **changes}
        response = await self._client.post("/messages", json=body)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()
        prompt = self.service.requests[-1].prompt_token_ids
        self.prompts.append(self.service.tokenizer.decode(prompt))
        counted = {name: body[name] for name in body if name not in ("max_tokens", "metadata")}
        assert (await self._client.post("/messages/count_tokens", json=counted)).json() == {"input_tokens": len(prompt)}
        self.messages.append({"role": message["role"], "content": message["content"]})
        return message

    def _marked(self) -> list[dict[str, Any]]:
        """The last message's last block is where the cache shall reach to."""
        *rest, last = self.messages
        if not isinstance(last["content"], list):
            return self.messages
        *blocks, block = last["content"]
        return [*rest, {**last, "content": [*blocks, {**block, **EPHEMERAL}]}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def results(message: dict[str, Any], *contents: Any, **fields: Any) -> list[dict[str, Any]]:
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call["id"], "content": content, **fields}
        for call, content in zip(calls, contents, strict=True)
    ]


@pytest.fixture(params=["", FIRST_ONLY], ids=["any system message", "system first"])
def session(request: pytest.FixtureRequest) -> Session:
    service = service_of("", max_model_len=20_000)
    service.tokenizer = tokenizer_of(HERMES, request.param + TURNS)
    return Session(service)


async def test_a_task_with_an_interruption(session: Session) -> None:
    first = await session.turn(READ, REMINDER, text("Mend a.py."))
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["stop_reason"] == "tool_use"
    second = await session.turn(TWO, *results(first, "     1\tx = 1\n"))
    third = await session.turn(
        READ,
        *results(second, [text("x = 2")], "1 failed", is_error=True),
        text("<system-reminder>New.</system-reminder>"),
    )
    # Escape: the call has not run, and the user goes on in the same message.
    refused = results(third, "The user doesn't want to proceed with this tool use.", is_error=True)
    await session.turn(DONE, *refused, text("[Request interrupted by user for tool use]"), text("Leave it."))
    # Escape in the midst of a text: what had come stays.
    session.messages[-1]["content"] = [text("I have")]
    await session.turn(DONE, text("[Request interrupted by user]"), text("Go on."))
    for before, after in zip(session.prompts, session.prompts[1:], strict=False):
        assert after.startswith(before)
    assert session.prompts[-1].count("Agents: none.") == 1
    assert "billing" not in session.prompts[-1]
    last = session.service.requests[-1]
    assert last.sampling_params.max_tokens + len(last.prompt_token_ids) == 20_000


async def test_a_conversation_that_is_compacted(session: Session) -> None:
    first = await session.turn(READ, text("Mend a.py."))
    await session.turn(
        "<think>\n</think>\n\n<summary>It is mended.</summary>", *results(first, "x"), text("Summarise.")
    )
    session.messages.clear()
    session.prompts.clear()
    carried = text("This session continues an earlier one: It is mended.")
    assert (await session.turn(DONE, carried, text("/compact")))["stop_reason"] == "end_turn"
    assert session.prompts[0].startswith("system:You are an agent.")


async def test_its_small_requests(session: Session) -> None:
    """A title in JSON, without tools or thoughts, and whether the server is there."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    changes = {
        "tools": [],
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "temperature": 1,
        "max_tokens": 1,
    }
    message = await session.turn('{"title": "x"}', text("quota"), **changes)
    assert message["stop_reason"] == "max_tokens"
    assert session.service.requests[-1].sampling_params.grammar is not None
