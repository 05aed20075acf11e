"""Exact mode over REST: who drafts, how much, and beside whom changes no byte; and the figures of it are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from e2e_exact import (
    METRIC_KEYS,
    NUM_TOKENS,
    OFF,
    PROMPTS,
    SETTINGS,
    check_figures,
    counters,
    request_body,
    same_bytes,
    same_bytes_alone_and_together,
)
from e2e_rest import complete, speculation
from e2e_stack import RunningStack

from outrider.client.stack.own_redis import redis_url_of
from outrider.shared.log.commit_log import CommitLog

DRAFTED = {
    f"{method} {length}": speculation(method, length) for method in ("ngram", "draft_model") for length in (1, 3, 8)
}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_alone_and_together(http: httpx.AsyncClient, setting: str) -> None:
    reference = await complete(http, request_body(PROMPTS[0], SETTINGS[setting], OFF))
    assert len(reference.token_ids) == NUM_TOKENS
    assert set(reference.origins) == {"target"}
    check_figures(reference, 0)
    alone = await same_bytes_alone_and_together(http, setting, {**DRAFTED, "auto": speculation("auto")})
    for name, way in DRAFTED.items():
        assert alone[name].speculation["num_spec_steps"] > 0, name
        check_figures(alone[name], way["speculation"]["num_speculative_tokens"])


async def test_choices_of_one_request_are_the_same_with_drafts(http: httpx.AsyncClient) -> None:
    async def texts(way: Mapping[str, Any]) -> list[str]:
        body = request_body(PROMPTS[1], {"n": 3, "temperature": 1, "seed": 8}, way)
        reply = await http.post("/v1/completions", json=body)
        return [choice["text"] for choice in reply.json()["choices"]]

    plain = await texts(OFF)
    assert len(set(plain)) == 3
    assert await texts(speculation("draft_model", 4)) == plain


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_logprobs_and_stop_are_the_same_with_drafts(http: httpx.AsyncClient, method: str) -> None:
    full = await complete(http, request_body(PROMPTS[0], {"temperature": 0, "logprobs": 3}, OFF))
    drafted = await complete(http, request_body(PROMPTS[0], {"temperature": 0, "logprobs": 3}, speculation(method, 5)))
    assert drafted.logprobs == full.logprobs
    stop = full.text[len(full.text) // 2 :][:4]
    fields = {"temperature": 0, "stop": stop}
    plain = await complete(http, request_body(PROMPTS[0], fields, OFF))
    assert plain.text == full.text[: full.text.index(stop)]
    answer = await complete(http, request_body(PROMPTS[0], fields, speculation(method, 5)))
    assert same_bytes(answer, plain)
    assert answer.finish_reason == "stop"
    check_figures(answer, 5)


async def test_a_stream_carries_the_figures_with_its_usage(http: httpx.AsyncClient) -> None:
    body = request_body(PROMPTS[0], {"temperature": 0, "stream": True}, speculation("ngram", 3))
    whole = await complete(http, {**body, "stream": False})
    lines = (await http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})).text
    events = [line.removeprefix("data: ") for line in lines.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    last = httpx.Response(200, content=events[-2]).json()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    figures = last["metrics"]["speculative_decoding"]
    assert figures.keys() == METRIC_KEYS
    assert figures["num_spec_tokens"] == whole.speculation["num_spec_tokens"] == 3


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_prometheus_counts_what_the_answer_says(
    stack: RunningStack, http: httpx.AsyncClient, method: str
) -> None:
    other = "draft_model" if method == "ngram" else "ngram"
    before, before_other = counters(stack, method), counters(stack, other)
    tokens_before = stack.metric("outrider:generation_tokens_total")
    answer = await complete(http, request_body(PROMPTS[0], {"temperature": 0}, speculation(method, 3)))
    figures = answer.speculation
    moved = [after - earlier for after, earlier in zip(counters(stack, method), before, strict=True)]
    assert moved == [figures["num_spec_steps"], figures["num_draft_tokens"], figures["num_accepted_draft_tokens"]]
    assert moved[0] > 0
    assert counters(stack, other) == before_other
    assert stack.metric("outrider:generation_tokens_total") - tokens_before == NUM_TOKENS


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
async def test_the_commit_log_has_the_tokens_of_the_answer(
    stack: RunningStack, http: httpx.AsyncClient, method: str
) -> None:
    answer = await complete(http, request_body(PROMPTS[1], {"temperature": 1, "seed": 4}, speculation(method)))
    log = CommitLog.connect(redis_url_of(stack.state), ttl_s=60)
    try:
        await log.start()
        request = await log.find(answer.request_id)
        assert request is not None
        entries = (await request.read([0]))[0]
    finally:
        await log.close()
    logged: list[int] = []
    for entry in entries:
        assert entry.base_len == len(logged)
        logged.extend(entry.token_ids)
    assert tuple(logged) == answer.token_ids
    assert [entry.finish_reason != 0 for entry in entries] == [False] * (len(entries) - 1) + [True]


async def test_more_choices_than_the_verifier_has_places(http: httpx.AsyncClient) -> None:
    """A large `n` waits its turn for the verifier's 64 places; it is no error."""
    reply = await http.post("/v1/completions", json={"prompt": "def f(x):", "n": 96, "max_tokens": 3})
    assert reply.status_code == 200, reply.text
    assert sorted(choice["index"] for choice in reply.json()["choices"]) == list(range(96))
