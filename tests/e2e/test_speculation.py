"""Exact mode over REST: who drafts, how much, and beside whom changes no byte; and the figures of it are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from e2e_rest import Answer, complete, complete_all, speculation
from e2e_stack import RunningStack

from outrider.client.stack.own_redis import redis_url_of
from outrider.shared.log.commit_log import CommitLog

NUM_TOKENS = 128
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 71},
    "top-p": {"temperature": 1.1, "seed": 72, "top_p": 0.9, "top_k": 60, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "seed": 73,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"18": 1.5},
    },
}
DRAFTED = [(method, length) for method in ("ngram", "draft_model") for length in (1, 3, 8)]
METRIC_KEYS = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}
OFF = speculation("off")
# The repetition gives n-gram drafts something to find from the first token on.
PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "for name in names:\n    print(name)\nfor name in names:\n",
)


def request_body(prompt: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    for part in parts:
        body.update(part)
    return body


def check_figures(answer: Answer, length: int) -> None:
    """The figures of one choice, against each other and against the origins of its tokens."""
    figures = answer.speculation
    assert figures.keys() == METRIC_KEYS
    steps, drafted = figures["num_spec_steps"], figures["num_draft_tokens"]
    accepted, histogram = figures["num_accepted_draft_tokens"], figures["acceptance_histogram"]
    assert figures["num_spec_tokens"] == length
    assert sum(histogram) == steps
    assert sum(count * rounds for count, rounds in enumerate(histogram)) == accepted
    assert accepted <= drafted <= length * steps
    assert len(histogram) <= length + 1
    assert answer.origins.count("accepted") == accepted
    assert figures["draft_acceptance_rate"] == (accepted / drafted if drafted else 0)
    # A round with a draft ends in one token more, but for the one that reached max_tokens on an accepted token.
    ends = answer.origins.count("corrected") + answer.origins.count("bonus")
    assert figures["mean_acceptance_length"] == ((accepted + ends) / steps if steps else 0)
    assert steps - 1 <= ends <= steps
    assert len(answer.origins) == len(answer.token_ids)


def _same(answer: Answer, reference: Answer) -> bool:
    return (answer.token_ids, answer.text) == (reference.token_ids, reference.text)


@pytest.mark.parametrize("setting", SETTINGS)
async def test_alone(http: httpx.AsyncClient, setting: str) -> None:
    reference = await complete(http, request_body(PROMPTS[0], SETTINGS[setting], OFF))
    assert len(reference.token_ids) == NUM_TOKENS
    assert set(reference.origins) == {"target"}
    check_figures(reference, 0)
    for method, length in DRAFTED:
        answer = await complete(http, request_body(PROMPTS[0], SETTINGS[setting], speculation(method, length)))
        assert _same(answer, reference), (method, length)
        assert answer.speculation["num_spec_steps"] > 0
        check_figures(answer, length)


@pytest.mark.parametrize("setting", SETTINGS)
async def test_eight_at_once(http: httpx.AsyncClient, setting: str) -> None:
    """Eight requests of three prompts, each drafted in another way: all as when alone without drafts."""
    references = [await complete(http, request_body(prompt, SETTINGS[setting], OFF)) for prompt in PROMPTS]
    ways = [*(speculation(method, length) for method, length in DRAFTED), speculation("auto"), OFF]
    bodies = [request_body(PROMPTS[place % 3], SETTINGS[setting], way) for place, way in enumerate(ways)]
    answers = await complete_all(http, bodies)
    differing = [ways[place] for place, answer in enumerate(answers) if not _same(answer, references[place % 3])]
    assert differing == []


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
    assert _same(answer, plain)
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


def counters(stack: RunningStack, method: str) -> list[float]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [stack.metric(f"outrider:spec_decode_{name}_total", method=method) for name in names]


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
