"""A thinking budget in a whole stack: the same answer with and without drafts, from any event on, and by every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2e_stack import DEMO_DRAFT, DEMO_TARGET, RunningStack, run_stack
from e2e_thinking import save_thinking

pytestmark = pytest.mark.storm
MESSAGES: list[Any] = [{"role": "user", "content": "Write a function that reads a file."}]


@pytest.fixture(scope="module")
def thinking_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("thinking")
    target, draft = (save_thinking(path, folder / path.name) for path in (DEMO_TARGET, DEMO_DRAFT))
    with run_stack(folder / "run", dtype="auto", draft_model=draft, model=target) as running:
        yield running


@pytest.fixture(scope="module")
def http(thinking_stack: RunningStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{thinking_stack.url}/v1", timeout=120) as client:
        yield client


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": MESSAGES,
        "max_tokens": 40,
        "min_tokens": 30,
        "seed": 5,
        "temperature": 0.7,
        "return_token_ids": True,
        **fields,
    }
    answer = http.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_it_is_held_to_the_token_whatever_is_drafted(http: httpx.Client, budget: int) -> None:
    free = chat(http)["choices"][0]
    end_id = chat(http, thinking_token_budget=0)["choices"][0]["token_ids"][0]
    assert free["message"]["content"] is None, "the demo does not end its thinking"
    answers = []
    for method in ("off", "ngram", "draft_model"):
        for num_draft_tokens in (1, 4, 9):
            speculation = {"method": method, "num_speculative_tokens": num_draft_tokens}
            answer = chat(http, thinking_token_budget=budget, speculation=speculation)
            (choice,) = answer["choices"]
            assert choice["token_ids"][: budget + 1] == [*free["token_ids"][:budget], end_id]
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1
            assert choice["message"]["content"]
            answers.append((choice["token_ids"], choice["message"]))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("method", ["off", "draft_model"])
def test_a_stream_goes_on_across_the_border(http: httpx.Client, method: str) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 20,
        "min_tokens": 16,
        "thinking_token_budget": 5,
        "stream": True,
        "temperature": 0,
        "speculation": {"method": method, "num_speculative_tokens": 1},
    }
    blocks = http.post("/chat/completions", json=body).text.split("\n\n")
    ids = [block.split("\n")[0].removeprefix("id: ") for block in blocks if block.startswith("id:")]
    assert len(ids) > 5, "sixteen tokens are at least eight commits"
    for place, event_id in enumerate(ids):
        rest = http.post("/chat/completions", json=body, headers={"last-event-id": event_id}).text
        assert rest.split("\n\n") == blocks[place + 1 :], event_id


def test_responses_and_messages_have_it_too(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"seed": 5, "temperature": 0}
    response = http.post(
        "/responses", json={**asked, "input": MESSAGES, "max_output_tokens": 20, "thinking_token_budget": 2}
    ).json()
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    thinking = {"type": "enabled", "budget_tokens": 2}
    body = {**asked, "model": "demo-target", "messages": MESSAGES, "max_tokens": 20, "thinking": thinking}
    message = http.post("/messages", json=body).json()
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == 3
    assert message["content"][0]["thinking"] == response["output"][0]["content"][0]["text"]


def test_a_grammar_begins_where_the_budget_ends(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = chat(http, thinking_token_budget=5, response_format=response_format, max_tokens=80, min_tokens=0)
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (1, 2)
