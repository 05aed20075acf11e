"""Ranges of the sampling parameters, and which mode is the default."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import SamplingParams, SpeculationMode


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        (SamplingParams(), SpeculationMode.REJECTION),
        (SamplingParams(seed=0), SpeculationMode.EXACT),
        (SamplingParams(temperature=0.0), SpeculationMode.EXACT),
        (SamplingParams(temperature=0.7), SpeculationMode.REJECTION),
    ],
)
def test_a_seed_or_temperature_zero_means_exact(params: SamplingParams, mode: SpeculationMode) -> None:
    assert params.default_mode is mode


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (5e-324, True), (9e-5, True), (1e-4, False), (0.5, False)]
)
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    params = SamplingParams(temperature=temperature)
    params.validate()
    assert params.greedy is greedy
    assert (params.default_mode is SpeculationMode.EXACT) is greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", -1),
        ("logprob_token_ids", (3,)),
        ("logprob_token_ids", (3,) * 129),
        ("logit_bias", ((0, 101.0),)),
        ("logit_bias", ((0, math.nan),)),
    ],
)
def test_values_out_of_range_are_refused_and_named(field: str, value: Any) -> None:
    params = dataclasses.replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidRequest) as caught:
        params.validate()
    named = caught.value.param
    assert named is not None
    assert named in (field, field.removeprefix("num_"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 5e-324),
        ("temperature", 100.0),
        ("top_p", 1e-9),
        ("top_k", 2**31 - 1),
        ("min_p", 1.0),
        ("seed", 2**64 - 1),
        ("min_tokens", 16),
        ("presence_penalty", -2.0),
        ("num_logprobs", 20),
        ("logit_bias", ((3, -100.0), (4, 100.0))),
    ],
)
def test_the_ends_of_the_ranges_are_inside(field: str, value: Any) -> None:
    dataclasses.replace(SamplingParams(), **{field: value}).validate(vocab_size=10)


@pytest.mark.parametrize("token_id", [-1, 10])
@pytest.mark.parametrize(
    ("field", "wrap"),
    [
        ("stop_token_ids", lambda token: (1, token)),
        ("allowed_token_ids", lambda token: (token,)),
        ("logit_bias", lambda token: ((token, 1.0),)),
        ("bad_words", lambda token: ((1,), (2, token))),
    ],
)
def test_token_ids_must_be_in_the_vocabulary(field: str, wrap: Any, token_id: int) -> None:
    params = dataclasses.replace(SamplingParams(), **{field: wrap(token_id)})
    params.validate()
    with pytest.raises(InvalidRequest) as caught:
        params.validate(vocab_size=10)
    assert caught.value.param == field


def test_a_bad_word_must_have_a_token() -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(bad_words=((),)).validate()
