"""A stack without drafters, whose verifier drafts by itself: same bytes, true figures, and it may be killed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from e2e_exact import (
    NUM_TOKENS,
    OFF,
    PROMPTS,
    SETTINGS,
    check_figures,
    counters,
    request_body,
    same_bytes_alone_and_together,
)
from e2e_incident import BODY, goes_on_elsewhere
from e2e_rest import complete, speculation
from e2e_stack import DEMO_DRAFT, RunningStack, run_stack

pytestmark = pytest.mark.storm

DRAFTED = {
    f"{method} {length}": speculation(method, length) for method in ("ngram", "draft_model") for length in (1, 5)
}


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


@pytest.mark.parametrize("setting", SETTINGS)
async def test_same_bytes_alone_and_together(local_http: httpx.AsyncClient, setting: str) -> None:
    alone = await same_bytes_alone_and_together(local_http, setting, {**DRAFTED, "auto": speculation("auto")})
    for name, way in DRAFTED.items():
        assert alone[name].speculation["num_spec_steps"] > 0, name
        check_figures(alone[name], way["speculation"]["num_speculative_tokens"])


async def test_a_grammar_and_drafts(local_http: httpx.AsyncClient) -> None:
    fields = {"temperature": 0.8, "seed": 3, "structured_outputs": {"regex": "[a-z]{12}[0-9]{6}"}, "ignore_eos": False}
    plain = await complete(local_http, request_body(PROMPTS[1], fields, OFF))
    drafted = await complete(local_http, request_body(PROMPTS[1], fields, speculation("draft_model", 3)))
    assert drafted.text == plain.text
    assert len(plain.text) == 18
    assert drafted.speculation["num_draft_tokens"] > 0


async def test_metrics_count_what_the_answer_says(local_stack: RunningStack, local_http: httpx.AsyncClient) -> None:
    before = counters(local_stack, "draft_model")
    answer = await complete(local_http, request_body(PROMPTS[0], {"temperature": 0}, speculation("draft_model", 4)))
    figures = answer.speculation
    moved = [now - earlier for now, earlier in zip(counters(local_stack, "draft_model"), before, strict=True)]
    assert moved == [figures["num_spec_steps"], figures["num_draft_tokens"], figures["num_accepted_draft_tokens"]]
    fleet = (await local_http.get("/fleet")).json()
    assert fleet["drafters"] == []
    assert {method["name"] for method in fleet["verifiers"][0]["methods"]} == {"draft_model", "ngram"}


async def test_a_killed_verifier_goes_on_drafting_elsewhere(
    local_stack: RunningStack, local_http: httpx.AsyncClient
) -> None:
    quiet = await complete(local_http, BODY)
    assert quiet.speculation["num_accepted_draft_tokens"] > 0
    await goes_on_elsewhere(local_stack, local_http, "verifier", BODY, quiet)


async def test_a_stream_says_who_drafted(local_stack: RunningStack, local_http: httpx.AsyncClient) -> None:
    fields = {"temperature": 0, "stream": True}
    request = request_body(PROMPTS[0], fields, speculation("draft_model", 4, annotate=True))
    lines = (await local_http.post("/v1/completions", json=request)).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [choice["outrider"] for event in events for choice in event["choices"]]
    origins = [origin for part in told for origin in part["origins"]]
    assert len(origins) == NUM_TOKENS
    assert {"accepted", "corrected"} <= set(origins)
    rounds = [one for part in told for one in part["rounds"] if one["num_draft_tokens"]]
    assert {(one["method"], one["drafter"]) for one in rounds} == {("draft_model", local_stack.state.verifiers[0])}
