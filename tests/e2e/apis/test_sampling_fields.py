"""Every sampling field, through REST: the same answer with drafts (chain and tree) as without, and an effect.

The table is checked against the schema: a field that is added there without a case here fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from e2e_rest import Answer, complete, speculation

from outrider.gateway.openai.schema import CompletionRequest

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add("
OFF = speculation("off")
DRAFTED = {
    "draft_model chain": speculation("draft_model", 5),
    "draft_model tree": speculation("draft_model", 8, token_tree=True),
    "ngram": speculation("ngram", 4),
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
SEEDED = {"temperature": 0.9, "seed": 11}
# Case -> (fields, fields of the plain answer that it has to differ from; None: there is no such answer).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "temperature": ({"temperature": 1.3, "seed": 11}, SEEDED),
    "seed": ({"temperature": 0.9, "seed": 12}, SEEDED),
    "top_k": ({**SEEDED, "top_k": 2}, SEEDED),
    "top_p": ({**SEEDED, "top_p": 0.4}, SEEDED),
    "min_p": ({**SEEDED, "min_p": 0.3}, SEEDED),
    "presence_penalty": ({**SEEDED, "presence_penalty": 1.5}, SEEDED),
    "frequency_penalty": ({"temperature": 0, "frequency_penalty": 1.1}, {"temperature": 0}),
    "repetition_penalty": ({"temperature": 0, "repetition_penalty": 1.4}, {"temperature": 0}),
    "logit_bias": ({**SEEDED, "logit_bias": {"18": 3.0, "40": -100}}, SEEDED),
    "allowed_token_ids": ({**SEEDED, "allowed_token_ids": list(range(30, 400))}, SEEDED),
    "bad_words": ({"temperature": 0, "bad_words": [",", " b"]}, {"temperature": 0}),
    "logprobs": ({**SEEDED, "logprobs": 3}, None),
    "prediction": ({**SEEDED, "prediction": {"type": "content", "content": "import os\nimport sys\n"}}, None),
    "logprob_token_ids": ({**SEEDED, "logprobs": 1, "logprob_token_ids": [40, 18]}, None),
    "structured_outputs.json": ({**SEEDED, "structured_outputs": {"json": SCHEMA}}, SEEDED),
    "structured_outputs.json_object": ({**SEEDED, "structured_outputs": {"json_object": True}}, SEEDED),
    "structured_outputs.regex": ({**SEEDED, "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2},){4}"}}, SEEDED),
    "structured_outputs.choice": ({**SEEDED, "structured_outputs": {"choice": ["red wine", "red", "blue"]}}, SEEDED),
    "structured_outputs.grammar": (
        {**SEEDED, "structured_outputs": {"grammar": 'start: item ("," item){2,5}\nitem: /[0-9]+/ "+" /[0-9]+/'}},
        SEEDED,
    ),
    "response_format.json_schema": (
        {**SEEDED, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        SEEDED,
    ),
    "response_format.json_object": ({**SEEDED, "response_format": {"type": "json_object"}}, SEEDED),
}
# Sampling fields whose cases are tests of their own below.
ELSEWHERE = {"n", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "max_tokens"}
# Of a completion request, what does not touch how tokens are drawn.
NOT_SAMPLING = {
    *("model", "prompt", "echo", "stream", "stream_options", "request_id", "skip_special_tokens", "add_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "return_token_ids", "prompt_logprobs", "cache_salt", "speculation"),
    *("max_completion_tokens", "best_of", "return_tokens_as_token_ids", "suffix", "receipt"),
}


def test_every_sampling_field_of_the_schema_has_a_case() -> None:
    covered = {name.split(".")[0] for name in CASES} | ELSEWHERE | NOT_SAMPLING
    assert set(CompletionRequest.model_fields) - covered == set()


def _body(*parts: Mapping[str, Any], max_tokens: int = 96) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": max_tokens, "skip_special_tokens": False}
    for part in parts:
        body.update(part)
    return body


def _what_matters(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, json.dumps(answer.logprobs)


async def _same_however_drafted(http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    plain = await complete(http, {**body, **OFF})
    for name, way in DRAFTED.items():
        answer = await complete(http, {**body, **way})
        assert _what_matters(answer) == _what_matters(plain), name
        if name != "ngram" and len(plain.token_ids) > 2:
            assert answer.speculation["num_draft_tokens"] > 0, name
    return plain


@pytest.mark.parametrize("case", CASES)
async def test_the_same_with_drafts_as_without(http: httpx.AsyncClient, case: str) -> None:
    fields, without = CASES[case]
    plain = await _same_however_drafted(http, _body(fields))
    if without is not None:
        other = await complete(http, _body(without, OFF))
        assert other.token_ids != plain.token_ids, f"{case} has no effect"
    if case in ("structured_outputs.json", "response_format.json_schema"):
        assert set(json.loads(plain.text)) == {"name", "size"}


async def test_choices(http: httpx.AsyncClient) -> None:
    async def texts(way: Mapping[str, Any]) -> list[str]:
        reply = await http.post("/v1/completions", json=_body(SEEDED, {"n": 3}, way, max_tokens=48))
        assert reply.status_code == 200, reply.text
        return [choice["text"] for choice in reply.json()["choices"]]

    plain = await texts(OFF)
    assert len(set(plain)) == 3
    for name, way in DRAFTED.items():
        assert await texts(way) == plain, name


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_inside_drafts(http: httpx.AsyncClient, include: bool) -> None:
    whole = await complete(http, _body(SEEDED, OFF))
    # Places that drafts reach across: some end within a token, some within an accepted run.
    for place in range(5, len(whole.text) - 6, len(whole.text) // 6):
        stop = whole.text[place : place + 3]
        end = whole.text.index(stop)
        fields = {**SEEDED, "stop": [stop], "include_stop_str_in_output": include}
        plain = await _same_however_drafted(http, _body(fields))
        assert plain.finish_reason == "stop"
        assert plain.text == whole.text[: end + len(stop) if include else end]


async def test_stop_token_ids_inside_drafts(http: httpx.AsyncClient) -> None:
    whole = await complete(http, _body({"temperature": 0}, OFF))
    for token in dict.fromkeys(whole.token_ids[3:40:5]):
        plain = await _same_however_drafted(http, _body({"temperature": 0, "stop_token_ids": [token]}))
        assert plain.finish_reason == "stop"
        assert plain.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


async def test_min_tokens_and_the_models_own_end(http: httpx.AsyncClient) -> None:
    """A bias makes the model end at once; min_tokens holds that back, ignore_eos goes past it."""
    end = {"temperature": 0, "logit_bias": {"0": 100.0}}
    assert (await _same_however_drafted(http, _body(end))).finish_reason == "stop"
    held = await _same_however_drafted(http, _body(end, {"min_tokens": 17}))
    assert len(held.token_ids) == 18
    assert held.finish_reason == "stop"
    past = await _same_however_drafted(http, _body(SEEDED, {"ignore_eos": True, "logit_bias": {"0": 3.0}}))
    assert past.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_max_tokens_cuts_inside_drafts(http: httpx.AsyncClient, max_tokens: int) -> None:
    plain = await _same_however_drafted(http, _body(SEEDED, max_tokens=max_tokens))
    assert len(plain.token_ids) == max_tokens
