"""What a request's thinking budget tells the verifier: which tokens think, and which one must end it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService
from hermes_service import service_of
from tool_tokenizers import TEMPLATE, tokenizer_of
from tool_transcripts import HERMES

from outrider.gateway.request.record import SessionRecord, new_record
from outrider.gateway.servers.http.app import create_app
from outrider.shared.sampling_params import ThinkingBudget

USER = [{"role": "user", "content": "Why?"}]
TEXT = "<think>\nBecause.\n</think>\n\nSo."
TOOL = {"name": "now", "parameters": {"type": "object", "properties": {}}}
PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": USER, "thinking_token_budget": 7},
    "responses": {"input": "Why?", "thinking_token_budget": 7},
    "messages": {"messages": USER, "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 7}},
}


async def post(service: ScriptedService, path: str = "chat/completions", **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(f"/v1/{path}", json={"model": "demo", **body})


async def budget_of(service: ScriptedService, path: str = "chat/completions", **body: Any) -> ThinkingBudget | None:
    response = await post(service, path, **body)
    assert response.status_code == 200, response.text
    return service.requests[-1].sampling_params.thinking_budget


@pytest.mark.parametrize("path", PATHS)
async def test_every_api_has_one(path: str) -> None:
    service = service_of(TEXT)
    ids = service.tokenizer.control_tokens
    budget = await budget_of(service, path, **PATHS[path])
    assert budget == ThinkingBudget(7, ids["</think>"], (ids["<think>"],))
    (kind, prepared), *_ = service.begun.values()
    assert SessionRecord.decode(new_record(kind, prepared).encode()).prepared.requests[0].sampling_params == (
        service.requests[-1].sampling_params
    ), "whoever goes on with the request keeps to it"


async def test_a_call_ends_thinking_too_and_a_prompt_may_begin_it() -> None:
    service = service_of("Because.</think>So.")
    service.tokenizer = tokenizer_of(HERMES, TEMPLATE + "<think>")
    ids = service.tokenizer.control_tokens
    budget = await budget_of(
        service, messages=USER, thinking_token_budget=0, tools=[{"type": "function", "function": TOOL}]
    )
    assert budget == ThinkingBudget(0, ids["</think>"], (ids["<think>"],), (ids["<tool_call>"],), starts_open=True)


async def test_a_marker_with_text_behind_its_token_begins_with_the_token() -> None:
    service = service_of("Hm.", reasoning_parser="gemma4", tool_call_parser="none")
    service.tokenizer = tokenizer_of(("<|channel>", "<channel|>"))
    budget = await budget_of(service, messages=USER, thinking_token_budget=1)
    ids = service.tokenizer.control_tokens
    assert budget == ThinkingBudget(1, ids["<channel|>"], (ids["<|channel>"],))


async def test_harmony_thinks_in_one_channel() -> None:
    service = service_of("Hm.", reasoning_parser="openai_gptoss", tool_call_parser="openai")
    service.tokenizer = tokenizer_of(("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"))
    budget = await budget_of(service, messages=USER, thinking_token_budget=1)
    ids = service.tokenizer.control_tokens
    analysis = service.tokenizer.encode("analysis", add_special_tokens=False)
    assert budget == ThinkingBudget(1, ids["<|end|>"], (ids["<|channel|>"], *analysis, ids["<|message|>"]))


@pytest.mark.parametrize("budget", [None, -1])
async def test_without_one_there_is_no_limit(budget: int | None) -> None:
    assert await budget_of(service_of(TEXT), messages=USER, thinking_token_budget=budget) is None


@pytest.mark.parametrize(
    ("budget", "model", "message"),
    [
        (-2, {}, "thinking_token_budget must be at least 0, or -1 for no limit, got -2"),
        (0.6, {}, "thinking_token_budget must be a whole number"),
        (5, {"reasoning_parser": "none"}, "the served model is not known to reason"),
        (5, {"reasoning_parser": "mistral"}, "'[/THINK]', which ends the served model's reasoning, is no token"),
    ],
)
async def test_what_cannot_be_held_is_refused_by_name(budget: float, model: dict[str, str], message: str) -> None:
    response = await post(service_of(TEXT, **model), messages=USER, thinking_token_budget=budget)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "thinking_token_budget"


async def test_anthropics_clients_always_send_one_so_it_may_go_unheld() -> None:
    body = PATHS["messages"]
    assert await budget_of(service_of(TEXT, reasoning_parser="mistral"), "messages", **body) is None
    response = await post(
        service_of(TEXT), "messages", **{**body, "thinking": {"type": "enabled", "budget_tokens": -1}}
    )
    assert response.status_code == 400
    assert "thinking.budget_tokens must be at least 0" in response.json()["error"]["message"]
