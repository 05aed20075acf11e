"""Requests in exact mode, whose bytes no draft may change; and the figures that an answer gives of its drafts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import httpx
from e2e_rest import Answer, complete, complete_all, speculation
from e2e_stack import RunningStack

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
METRIC_KEYS = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
    "saved_ms",
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


def same_bytes(answer: Answer, reference: Answer) -> bool:
    return (answer.token_ids, answer.text) == (reference.token_ids, reference.text)


async def same_bytes_alone_and_together(
    http: httpx.AsyncClient, setting: str, ways: Mapping[str, Mapping[str, Any]]
) -> dict[str, Answer]:
    """Each of up to seven ways alone, then eight requests of three prompts at once, all as when alone without drafts.

    Returns the answer of each way alone.
    """
    references = [await complete(http, request_body(prompt, SETTINGS[setting], OFF)) for prompt in PROMPTS]
    alone = {}
    for name, way in ways.items():
        alone[name] = await complete(http, request_body(PROMPTS[0], SETTINGS[setting], way))
        assert same_bytes(alone[name], references[0]), name
    eight = list(itertools.islice(itertools.cycle([*ways.items(), ("off", OFF)]), 8))
    bodies = [request_body(PROMPTS[place % 3], SETTINGS[setting], way) for place, (_, way) in enumerate(eight)]
    answers = await complete_all(http, bodies)
    differing = [name for place, (name, _) in enumerate(eight) if not same_bytes(answers[place], references[place % 3])]
    assert differing == []
    return alone


def counters(stack: RunningStack, method: str) -> list[float]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [stack.metric(f"outrider:spec_decode_{name}_total", method=method) for name in names]
