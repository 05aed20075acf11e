"""SamplingParams offline, as the request that is generated: no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.gateway.openai.convert import Served
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ValidRequest
from outrider.gateway.servers.service import RequestLimits, ServedModel
from outrider.offline import SamplingParams, StructuredOutputsParams
from outrider.offline.prompts import Preparation, Prompt
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import Grammar, GrammarKind

TARGET = Path(__file__).parents[2] / "models/demo-target"


@pytest.fixture(scope="module")
def preparation() -> Preparation:
    tokenizer = Tokenizer.load(TARGET)
    return Preparation(Served(ServedModel("demo", 256, 2048, ("ngram",)), tokenizer, RequestLimits()), None)


def request_of(preparation: Preparation, prompt: object = "import os", **given: Any) -> ValidRequest:
    return preparation.prepare(0, Prompt(prompt), SamplingParams(**given)).request


@pytest.mark.parametrize(
    "given",
    [
        {"speculation": Speculation(method="ngram", num_speculative_tokens=3, mode="exact", token_tree=False)},
        {"speculation": {"method": "ngram", "num_speculative_tokens": 3, "mode": "exact", "token_tree": False}},
    ],
)
def test_speculation_is_a_field_and_an_extra_argument(preparation: Preparation, given: dict[str, Any]) -> None:
    expected = Speculation(method="ngram", num_speculative_tokens=3, mode="exact", token_tree=False)
    assert request_of(preparation, **given).speculation == expected
    assert request_of(preparation, extra_args=given).speculation == expected
    assert request_of(preparation).speculation == Speculation(method="auto")


def test_the_prompts_own_salt_goes_first(preparation: Preparation) -> None:
    assert request_of(preparation).cache_salt == ""
    assert request_of(preparation, cache_salt="a").cache_salt == "a"
    assert request_of(preparation).predicted_token_ids == ()
    assert request_of(preparation, prediction="import os").predicted_token_ids
    assert request_of(preparation, {"prompt": "x"}, cache_salt="a").cache_salt == "a"
    assert request_of(preparation, {"prompt": "x", "cache_salt": "b"}, cache_salt="a").cache_salt == "b"


def test_structured_outputs_as_a_class_and_as_a_mapping(preparation: Preparation) -> None:
    expected = Grammar(GrammarKind.REGEX, "a+")
    for given in (StructuredOutputsParams(regex="a+"), {"regex": "a+"}):
        assert request_of(preparation, structured_outputs=given).sampling_params.grammar == expected


def test_fields_that_the_client_refuses(preparation: Preparation) -> None:
    request = request_of(
        preparation,
        n=2,
        prompt_logprobs=1,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        truncate_prompt_tokens=1,
        bad_words=["os"],
        max_tokens=None,
    )
    assert (request.n, request.sampling_params.num_prompt_logprobs, request.include_stop_str_in_output) == (2, 1, True)
    assert (request.skip_special_tokens, len(request.prompt_token_ids)) == (False, 1)
    assert request.sampling_params.bad_words
    assert request.sampling_params.max_tokens == 255


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"bad_words": [[1, 2]]}, "bad_words"),
        ({"speculation": {"methods": "off"}}, "speculation.methods"),
        ({"speculation": Speculation(method="off"), "extra_args": {"speculation": {"method": "off"}}}, "speculation"),
    ],
)
def test_what_is_refused_is_named(preparation: Preparation, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request_of(preparation, **given)
    assert refused.value.param == param
