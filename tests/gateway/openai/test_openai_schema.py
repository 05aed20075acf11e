"""Bodies to ValidRequests: what each field becomes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from outrider.gateway.openai.schema import CompletionRequest
from outrider.gateway.request.served import Served
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.checkpoint.sampling_defaults import SamplingDefaults
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.gateway.openai.prepared import USER, chat, completion, one


def test_defaults_of_completions(served: Served, tokenizer: Tokenizer) -> None:
    request = one(completion(served))
    assert request.prompt_token_ids == tuple(tokenizer.encode("Hello"))
    assert request.sampling_params == SamplingParams()
    assert (request.n, request.stop, request.speculation) == (1, (), Speculation(method="auto"))
    assert request.request_id.startswith("cmpl-")


def test_chat_may_fill_the_context(served: Served, tokenizer: Tokenizer) -> None:
    request = one(chat(served))
    assert request.prompt_token_ids == tuple(tokenizer.encode("<|user|>\nhi<|end|>\n<|assistant|>\n"))
    assert request.sampling_params.max_tokens == served.model.max_model_len - len(request.prompt_token_ids)
    assert request.request_id.startswith("chatcmpl-")


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}),
    ({"temperature": 0.7, "top_p": 0}, {"temperature": 0.0, "top_p": 1.0}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 40}, {"top_k": 40}),
    ({"max_tokens": 7.0}, {"max_tokens": 7}),
    ({"max_completion_tokens": 9, "max_tokens": 7}, {"max_tokens": 9}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"seed": 42}, {"seed": 42}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"seed": -2}, {"seed": 2**64 - 2}),
    ({"seed": -(2**63)}, {"seed": 2**63}),
    ({"seed": -1}, {"seed": None}),
    ({"stop_token_ids": [4, 0, 4], "ignore_eos": True}, {"stop_token_ids": (4, 0), "ignore_eos": True}),
    ({"presence_penalty": -1, "frequency_penalty": 2}, {"presence_penalty": -1.0, "frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"logit_bias": {"50": -100, "7": 1.5}}, {"logit_bias": ((7, 1.5), (50, -100.0))}),
    ({"allowed_token_ids": [9, 5, 9]}, {"allowed_token_ids": (5, 9)}),
    ({"prompt_logprobs": 2}, {"num_prompt_logprobs": 2}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}}, {"grammar": Grammar(GrammarKind.JSON_OBJECT, "")}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')},
    ),
    (
        {"structured_outputs": {"json_object": True}},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')},
    ),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": Grammar(GrammarKind.REGEX, "a+")}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"grammar": Grammar(GrammarKind.CHOICE, '["a", "b"]')}),
    ({"structured_outputs": {"grammar": "start: x"}}, {"grammar": Grammar(GrammarKind.LARK, "start: x")}),
    ({"structured_outputs": {"json": '{"a":1}'}}, {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"a": 1}')}),
]


@pytest.mark.parametrize(("body", "expected"), FIELDS, ids=lambda value: json.dumps(value, default=str)[:60])
@pytest.mark.parametrize("endpoint", [completion, chat])
def test_fields_become_sampling_params(
    served: Served, endpoint: Any, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = one(endpoint(served, **body)).sampling_params
    default = one(endpoint(served)).sampling_params
    assert params == replace(default, **expected)


def test_null_is_not_given(served: Served) -> None:
    nulls = dict.fromkeys([*CompletionRequest.model_fields, "best_of", "suffix", "unheard_of"])
    del nulls["prompt"]
    assert one(completion(served, **nulls)).sampling_params == SamplingParams()


DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("endpoint", [completion, chat])
def test_sampling_defaults_stand_for_what_is_left_out(served: Served, endpoint: Any) -> None:
    neutral = one(endpoint(served)).sampling_params
    served = replace(served, model=replace(served.model, sampling_defaults=SamplingDefaults(**DEFAULTS)))
    assert one(endpoint(served)).sampling_params == replace(neutral, **DEFAULTS)
    assert one(endpoint(served, **dict.fromkeys(DEFAULTS))).sampling_params == replace(neutral, **DEFAULTS)
    assert one(endpoint(served, **NEUTRAL)).sampling_params == neutral
    assert one(endpoint(served, top_k=-1)).sampling_params == replace(neutral, **{**DEFAULTS, "top_k": 0})


def test_a_default_length_is_of_chats_and_a_limit_of_all(served: Served) -> None:
    """As in vLLM, whose completions have OpenAI's 16 tokens whatever the checkpoint says."""

    def lengths(defaults: SamplingDefaults, **asked: Any) -> tuple[int, int]:
        limited = replace(served, model=replace(served.model, sampling_defaults=defaults))
        return tuple(one(endpoint(limited, **asked)).sampling_params.max_tokens for endpoint in (completion, chat))

    assert lengths(SamplingDefaults(max_tokens=40)) == (16, 40)
    assert lengths(SamplingDefaults(max_tokens=40), max_tokens=50) == (50, 50)
    assert lengths(SamplingDefaults(max_tokens=9, max_tokens_limit=9)) == (9, 9)
    assert lengths(SamplingDefaults(max_tokens=9, max_tokens_limit=9), max_tokens=50) == (9, 9)
    room = served.model.max_model_len - len(one(chat(served)).prompt_token_ids)
    assert lengths(SamplingDefaults(max_tokens=9999))[1] == room


def test_log_probabilities(served: Served) -> None:
    prepared = completion(served, logprobs=0)
    assert one(prepared).sampling_params.num_logprobs == prepared.options.num_logprobs == 0
    assert one(chat(served)).sampling_params.num_logprobs is None
    assert one(chat(served, logprobs=True)).sampling_params.num_logprobs == 0
    assert one(chat(served, logprobs=True, top_logprobs=20)).sampling_params.num_logprobs == 20


@pytest.mark.parametrize("endpoint", [completion, chat])
def test_log_probabilities_of_named_tokens(served: Served, endpoint: Any) -> None:
    shown = one(endpoint(served, logprobs=True if endpoint is chat else 5, logprob_token_ids=[7, 5, 7])).sampling_params
    assert shown.logprob_token_ids == (7, 5)
    with pytest.raises(InvalidRequest, match="logprob_token_ids needs logprobs"):
        endpoint(served, logprob_token_ids=[7])
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        endpoint(served, logprobs=True if endpoint is chat else 5, logprob_token_ids=[10**6])


def test_named_tokens_need_an_output(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="logprob_token_ids needs output tokens"):
        completion(served, echo=True, max_tokens=0, logprobs=1, logprob_token_ids=[7])


def test_request_fields(served: Served) -> None:
    request = one(
        completion(
            served,
            n=3,
            stop="END",
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            cache_salt="tenant",
            request_id="mine",
            user="u",
            metadata={"a": "b"},
            store=True,
            service_tier="auto",
        )
    )
    assert (request.n, request.stop, request.include_stop_str_in_output) == (3, ("END",), True)
    assert (request.skip_special_tokens, request.cache_salt, request.request_id) == (False, "tenant", "cmpl-mine")
    assert one(completion(served, stop=["a", "b"])).stop == ("a", "b")


def test_request_id(served: Served) -> None:
    assert one(completion(served, request_id="body")).request_id == "cmpl-body"
    assert one(completion(served)).request_id != one(completion(served)).request_id


def test_speculation(served: Served) -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 4, "mode": "rejection", "annotate": True}
    prepared = completion(served, speculation=asked)
    assert one(prepared).speculation == Speculation(method="ngram", num_speculative_tokens=4, mode="rejection")
    assert prepared.options.annotate
    assert one(completion(served, speculation={"method": "off"})).speculation.method == "off"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", ["Hello"]),
        (["Hello", "world"], ["Hello", "world"]),
        ([44, 339, 308], [[44, 339, 308]]),
        ([[44, 339], [308]], [[44, 339], [308]]),
    ],
)
def test_prompt_forms(served: Served, tokenizer: Tokenizer, prompt: Any, expected: list[Any]) -> None:
    prepared = completion(served, prompt=prompt)
    wanted = [tuple(tokenizer.encode(entry) if isinstance(entry, str) else entry) for entry in expected]
    assert [request.prompt_token_ids for request in prepared.requests] == wanted
    assert len({request.request_id for request in prepared.requests}) == len(wanted)


def test_bad_words_with_and_without_a_space(served: Served, tokenizer: Tokenizer) -> None:
    words = one(completion(served, bad_words=["the", " cap"])).sampling_params.bad_words
    assert [tokenizer.decode(word) for word in words] == ["the", " the", "cap", " cap"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"truncate_prompt_tokens": 2}, [12, 13]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [10, 11]),
        ({"truncate_prompt_tokens": 9}, [10, 11, 12, 13]),
    ],
)
def test_truncation(served: Served, body: dict[str, Any], expected: list[int]) -> None:
    assert one(completion(served, prompt=[10, 11, 12, 13], **body)).prompt_token_ids == tuple(expected)


def test_truncation_to_what_the_context_allows(served: Served) -> None:
    request = one(completion(served, prompt=list(range(600)), truncate_prompt_tokens=-1, max_tokens=100))
    assert request.prompt_token_ids == tuple(range(600 - 412, 600))


def test_the_default_is_cut_to_the_context(served: Served) -> None:
    assert one(completion(served, prompt=[5] * 510)).sampling_params.max_tokens == 2
    assert one(completion(served, prompt=[5] * 511)).sampling_params.max_tokens == 1


def test_echo(served: Served) -> None:
    prepared = completion(served, prompt=["Hello", " 漢"], echo=True, logprobs=3)
    assert prepared.options.echo_texts == ("Hello", " 漢")
    assert prepared.requests[0].sampling_params.num_prompt_logprobs == 3
    assert completion(served, prompt=[44, 339, 308], echo=True).options.echo_texts == ("Hello",)
    marked = served.tokenizer.encode("<|user|>Hello")
    for skip in (True, False):
        shown = completion(served, prompt=marked, echo=True, skip_special_tokens=skip)
        assert shown.options.echo_texts == ("<|user|>Hello",)
    cut = completion(served, prompt="Hello", echo=True, truncate_prompt_tokens=1)
    assert cut.options.echo_texts == ("lo",)
    assert one(completion(served, echo=True, max_tokens=0)).sampling_params.max_tokens == 1


def test_messages(served: Served, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = one(chat(served, messages=[{"role": "user", "content": parts, "name": None}]))
    assert tokenizer.decode(request.prompt_token_ids, False) == "<|user|>\na\nb<|end|>\n<|assistant|>\n"
    for refused in ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": None, "refusal": "No."}):
        request = one(chat(served, messages=[*USER, {"role": "assistant", **refused}, *USER]))
        assert "<|assistant|>\nNo.<|end|>" in tokenizer.decode(request.prompt_token_ids, False)
    messages = [*USER, {"role": "assistant", "content": "Sure"}]
    request = one(chat(served, messages=messages, add_generation_prompt=False, continue_final_message=True))
    assert tokenizer.decode(request.prompt_token_ids, False).endswith("<|assistant|>\nSure")


def test_harmless_values_of_unsupported_fields(served: Served) -> None:
    completion(
        served, stream_options={}, ec_transfer_params=None, routed_experts_prompt_start=0, return_mm_kwargs=False
    )
    completion(served, best_of=3, n=3, suffix="", use_beam_search=False, length_penalty=1.0, priority=0)
    chat(served, tools=[], tool_choice="auto", functions=[], modalities=["text"], parallel_tool_calls=True)


def test_unknown_fields_are_ignored_and_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="outrider.gateway.openai.schema"):
        completion(served, unheard_of=5, user="u")
    assert "['unheard_of']" in caplog.text
