"""A stack without drafters, whose verifier drafts by itself: same bytes, true figures, and it may be killed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from e2e_rest import complete, complete_all, speculation
from e2e_stack import DEMO_DRAFT, RunningStack, run_stack
from test_failover import BODY, NUM_TOKENS, Seen, interrupted
from test_speculation import OFF, PROMPTS, SETTINGS, check_figures

pytestmark = pytest.mark.storm

DRAFTED = [(method, length) for method in ("ngram", "draft_model") for length in (1, 5)]


@pytest.fixture(scope="module")
def local_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    run_dir = tmp_path_factory.mktemp("local-stack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_FAILOVER_S", "150")  # loading another verifier takes a minute on a busy machine
        with run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, is_paced=True, num_drafters=0) as running:
            yield running


@pytest.fixture(scope="module")
async def local_http(local_stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=local_stack.url, timeout=300) as client:
        yield client


def body(prompt: str, *parts: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 96, "ignore_eos": True, "skip_special_tokens": False}
    for part in parts:
        fields.update(part)
    return fields


@pytest.mark.parametrize("setting", SETTINGS)
async def test_same_bytes_alone_and_together(local_http: httpx.AsyncClient, setting: str) -> None:
    references = [await complete(local_http, body(prompt, SETTINGS[setting], OFF)) for prompt in PROMPTS]
    for method, length in DRAFTED:
        answer = await complete(local_http, body(PROMPTS[0], SETTINGS[setting], speculation(method, length)))
        assert answer.token_ids == references[0].token_ids, (method, length)
        assert answer.speculation["num_spec_steps"] > 0
        check_figures(answer, length)
    ways = [*(speculation(method, length) for method, length in DRAFTED), speculation("auto"), OFF, speculation("auto")]
    bodies = [body(PROMPTS[place % 3], SETTINGS[setting], way) for place, way in enumerate(ways)]
    answers = await complete_all(local_http, bodies)
    assert [answer.text for answer in answers] == [references[place % 3].text for place in range(len(ways))]


async def test_a_grammar_and_drafts(local_http: httpx.AsyncClient) -> None:
    fields = {"temperature": 0.8, "seed": 3, "structured_outputs": {"regex": "[a-z]{12}[0-9]{6}"}, "ignore_eos": False}
    plain = await complete(local_http, body(PROMPTS[1], fields, OFF))
    drafted = await complete(local_http, body(PROMPTS[1], fields, speculation("draft_model", 3)))
    assert drafted.text == plain.text
    assert len(plain.text) == 18
    assert drafted.speculation["num_draft_tokens"] > 0


async def test_metrics_count_what_the_answer_says(local_stack: RunningStack, local_http: httpx.AsyncClient) -> None:
    def counted(name: str) -> float:
        return local_stack.metric(f"outrider:spec_decode_{name}_total", method="draft_model")

    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    before = [counted(name) for name in names]
    answer = await complete(local_http, body(PROMPTS[0], {"temperature": 0}, speculation("draft_model", 4)))
    figures = answer.speculation
    moved = [counted(name) - earlier for name, earlier in zip(names, before, strict=True)]
    assert moved == [figures["num_spec_steps"], figures["num_draft_tokens"], figures["num_accepted_draft_tokens"]]
    fleet = (await local_http.get("/fleet")).json()
    assert fleet["drafters"] == []
    assert {method["name"] for method in fleet["verifiers"][0]["methods"]} == {"draft_model", "ngram"}


async def test_a_killed_verifier_goes_on_drafting_elsewhere(
    local_stack: RunningStack, local_http: httpx.AsyncClient
) -> None:
    quiet = await complete(local_http, BODY)
    assert quiet.speculation["num_accepted_draft_tokens"] > 0

    def kill() -> None:
        local_stack.kill("verifier")
        local_stack.revive()

    seen: Seen = await interrupted(local_http, kill)
    assert (seen.text, tuple(seen.token_ids)) == (quiet.text, quiet.token_ids)
    assert len(seen.token_ids) == NUM_TOKENS
    assert local_stack.metric("outrider:verifier_failovers_total") >= 1
    local_stack.wait_fleet()
    again = await complete(local_http, BODY)
    assert again.token_ids == quiet.token_ids
    assert again.speculation["num_accepted_draft_tokens"] > 0
    local_stack.wait_idle()


async def test_a_stream_says_who_drafted(local_stack: RunningStack, local_http: httpx.AsyncClient) -> None:
    fields = {"temperature": 0, "stream": True}
    request = body(PROMPTS[0], fields, speculation("draft_model", 4, annotate=True))
    lines = (await local_http.post("/v1/completions", json=request)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [choice["outrider"] for event in events for choice in event["choices"]]
    origins = [origin for part in told for origin in part["origins"]]
    assert len(origins) == 96
    assert {"accepted", "corrected"} <= set(origins)
    rounds = [one for part in told for one in part["rounds"] if one["num_draft_tokens"]]
    assert {(one["method"], one["drafter"]) for one in rounds} == {("draft_model", local_stack.state.verifiers[0])}
