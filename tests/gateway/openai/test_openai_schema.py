"""Bodies to ValidRequests: what each field becomes, and every refusal by its sentence and its field."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from gateway_script import ScriptedService

from outrider.gateway.openai.convert import prepare_chat, prepare_completion
from outrider.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, parse_body
from outrider.gateway.request.served import RequestLimits, Served
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import Prepared, SpeculationRequest, ValidRequest
from outrider.shared.checkpoint.sampling_defaults import SamplingDefaults
from outrider.shared.errors import InvalidRequest, UnknownModel
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served(tokenizer: Tokenizer) -> Served:
    limits = RequestLimits(max_n=8, max_sequences=10, max_stop_strings=4, max_stop_chars=20, max_grammar_chars=99)
    return Served(ScriptedService(tokenizer).model, tokenizer, limits)


def completion(served: Served, **body: Any) -> Prepared:
    return prepare_completion(parse_body(CompletionRequest, {"prompt": "Hello", **body}), served)


def chat(served: Served, **body: Any) -> Prepared:
    return prepare_chat(parse_body(ChatCompletionRequest, {"messages": USER, **body}), served)


def one(prepared: Prepared) -> ValidRequest:
    [request] = prepared.requests
    return request


# ---- what is accepted -------------------------------------------------------------------------------------------


def test_defaults_of_completions(served: Served, tokenizer: Tokenizer) -> None:
    request = one(completion(served))
    assert request.prompt_token_ids == tuple(tokenizer.encode("Hello"))
    assert request.sampling_params == SamplingParams()
    assert (request.n, request.stop, request.speculation) == (1, (), SpeculationRequest())
    assert request.request_id.startswith("cmpl-")


def test_chat_may_fill_the_context(served: Served, tokenizer: Tokenizer) -> None:
    request = one(chat(served))
    assert request.prompt_token_ids == tuple(tokenizer.encode("<|user|>\nhi<|end|>\n<|assistant|>\n"))
    assert request.sampling_params.max_tokens == served.model.max_model_len - len(request.prompt_token_ids)
    assert request.request_id.startswith("chatcmpl-")


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}),
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
    assert one(prepared).speculation == SpeculationRequest("ngram", 4, SpeculationMode.REJECTION)
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


# ---- what is refused --------------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, dict[str, Any], str, str]] = [
    (completion, {"prompt": None}, "prompt", "prompt is required"),
    (completion, {"prompt": ""}, "prompt", "prompt is empty"),
    (completion, {"prompt": []}, "prompt", "prompt must not be empty"),
    (completion, {"prompt": [[]]}, "prompt", "prompt is empty"),
    (completion, {"prompt": ["a", 5]}, "prompt", "prompt entry 1 must be a string, got a number"),
    (completion, {"prompt": [5, "a"]}, "prompt", "prompt entry 1 must be a whole number, got a string"),
    (completion, {"prompt": [[1], "a"]}, "prompt", "prompt entry 1 must be a list, got a string"),
    (completion, {"prompt": [True]}, "prompt", "entry 0 is a boolean"),
    (completion, {"prompt": {"a": 1}}, "prompt", "got an object"),
    (completion, {"prompt": [4096]}, "prompt", r"token id 4096 is out of vocabulary \[0, 4096\)"),
    (completion, {"prompt": [-1]}, "prompt", "token id -1 is out of"),
    (completion, {"prompt": [5] * 512}, "prompt", "has 512 tokens; .* context of 512 tokens"),
    (completion, {"max_tokens": 510}, "max_tokens", "max_tokens is 510, but the prompt's 3 tokens leave room for 509"),
    (completion, {"max_completion_tokens": 510}, "max_completion_tokens", "max_completion_tokens is 510"),
    (completion, {"max_tokens": 0}, "max_tokens", "at least 1, or 0 together with echo"),
    (chat, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    (completion, {"max_tokens": -5}, "max_tokens", "at least 1"),
    (completion, {"max_tokens": 2.5}, "max_tokens", "must be a whole number, got 2.5"),
    (completion, {"max_tokens": "5"}, "max_tokens", "must be a whole number, got a string"),
    (completion, {"max_tokens": True}, "max_tokens", "must be a whole number, got a boolean"),
    (completion, {"max_tokens": 10**30}, "max_tokens", "must be a 64-bit number"),
    (completion, {"min_tokens": 17}, "min_tokens", "between 0 and 16"),
    (completion, {"model": "gpt"}, "model", "model 'gpt' is not served; the served model is 'demo'"),
    (chat, {"model": 5}, "model", "must be a string"),
    (completion, {"n": 0}, "n", "n must be between 1 and 8, got 0"),
    (completion, {"n": 9}, "n", "n must be between 1 and 8, got 9"),
    (completion, {"n": 6, "prompt": ["a", "b"]}, "n", "12 outputs, and one request may ask for 10"),
    (completion, {"temperature": float("nan")}, "temperature", "must be a finite number, got nan"),
    (completion, {"temperature": float("inf")}, "temperature", "must be a finite number"),
    (completion, {"temperature": "hot"}, "temperature", "must be a number, got a string"),
    (completion, {"temperature": -0.1}, "temperature", "between 0 and 100"),
    (completion, {"top_p": 0}, "top_p", r"in \(0, 1\]"),
    (completion, {"top_p": 1.1}, "top_p", "between 0 and 1"),
    (completion, {"top_k": -2}, "top_k", "top_k must be -1"),
    (completion, {"top_k": 2**40}, "top_k", "top_k must be between"),
    (completion, {"min_p": 2}, "min_p", "between 0 and 1"),
    (completion, {"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
    (completion, {"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be"),
    (completion, {"seed": 2**64}, "seed", "64-bit"),
    (completion, {"seed": -(2**63) - 1}, "seed", "64-bit"),
    (completion, {"logprobs": 21}, "logprobs", "between 0 and 20, got 21"),
    (completion, {"logprobs": True}, "logprobs", "must be a whole number"),
    (chat, {"logprobs": 5}, "logprobs", "must be true or false, got a number"),
    (chat, {"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
    (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    (completion, {"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
    (completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    (completion, {"stop": ""}, "stop", "must not contain an empty string"),
    (completion, {"stop": ["a", ""]}, "stop", "must not contain an empty string"),
    (completion, {"stop": list("abcde")}, "stop", "stop has 5 strings, the maximum is 4"),
    (completion, {"stop": "x" * 21}, "stop", "stop has a string of 21 characters"),
    (completion, {"stop": [1]}, "stop", "stop entry 0 must be a string"),
    (completion, {"stop_token_ids": [4096]}, "stop_token_ids", "token id 4096 is outside"),
    (completion, {"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    (completion, {"logit_bias": {"x": 1}}, "logit_bias", "must have token ids as keys, got 'x'"),
    (completion, {"logit_bias": {"x": 1, "5": 1, "y": 1}}, "logit_bias", "got 'x', 'y'"),
    (completion, {"logit_bias": {"5": "1"}}, "logit_bias", "logit_bias of token 5 must be a number"),
    (completion, {"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    (completion, {"logit_bias": {"9999": 1}}, "logit_bias", "token id 9999 is outside"),
    (completion, {"logit_bias": [1]}, "logit_bias", "must be an object"),
    (completion, {"bad_words": ["  "]}, "bad_words", "must not hold an empty string"),
    (completion, {"stream": "yes"}, "stream", "must be true or false, got a string"),
    (completion, {"stream_options": {"include_usage": False}}, "stream_options", "needs stream to be true"),
    (completion, {"stream": True, "stream_options": []}, "stream_options", "must be an object, got a list"),
    (
        completion,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "must be true or false",
    ),
    (completion, {"request_id": "a b"}, "request_id", "visible ASCII"),
    (completion, {"request_id": "x" * 129}, "request_id", "1 to 128"),
    (completion, {"cache_salt": ""}, "cache_salt", "1 to 256 characters"),
    (completion, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or between 1 and 512"),
    (completion, {"truncation_side": "middle"}, "truncation_side", '"left" or "right"'),
    (
        completion,
        {"speculation": {"method": "magic"}},
        "speculation.method",
        "not one of auto, off, ngram, draft_model",
    ),
    (completion, {"speculation": {"num_speculative_tokens": 0}}, "speculation.num_speculative_tokens", "1 and 32"),
    (completion, {"speculation": {"mode": "fast"}}, "speculation.mode", "not one of exact, rejection"),
    (completion, {"speculation": {"depth": 3}}, "speculation.depth", "speculation.depth is not a known field"),
    (completion, {"speculation": "ngram"}, "speculation", "must be an object, got a string"),
    (completion, {"response_format": {"type": "xml"}}, "response_format.type", "not one of text, json_object"),
    (completion, {"response_format": {}}, "response_format.type", "response_format.type is required"),
    (completion, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
    (completion, {"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    (completion, {"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exactly one"),
    (completion, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
    (completion, {"structured_outputs": {"json": "[" * 9999}}, "structured_outputs.json", "is not JSON"),
    (completion, {"structured_outputs": {"json": "5"}}, "structured_outputs.json", "must be an object"),
    (completion, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "non-empty strings"),
    (completion, {"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "must not be empty"),
    (
        completion,
        {"structured_outputs": {"regex": "a" * 100}},
        "structured_outputs",
        "100 characters, the maximum is 99",
    ),
    (completion, {"structured_outputs": {"structural_tag": "x"}}, "structural_tag", "is not supported"),
    (
        completion,
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "not both",
    ),
    (completion, {"best_of": 2}, "best_of", "best_of is 2, only the same as n is supported: 1"),
    (completion, {"use_beam_search": True}, "use_beam_search", "is not supported"),
    (completion, {"priority": False}, "priority", "is not supported"),
    (completion, {"guided_json": {}}, "guided_json", "is not supported"),
    (completion, {"prompt_embeds": "x"}, "prompt_embeds", "is not supported"),
    (chat, {"tools": [{"type": "function"}]}, "tools", "entry 0 must have a function"),
    (
        chat,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "takes no tools; .*--tool-call-parser",
    ),
    (chat, {"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    (chat, {"functions": [{"name": "f"}]}, "functions", "functions is not supported; use tools"),
    (chat, {"function_call": {"name": "f"}}, "function_call", "not supported; use tool_choice"),
    (chat, {"reasoning_effort": "hard"}, "reasoning_effort", "must be one of none, minimal"),
    (chat, {"return_prompt_text": True}, "return_prompt_text", "is not supported"),
    (completion, {"ec_transfer_params": {}}, "ec_transfer_params", "is not supported"),
    (completion, {"routed_experts_prompt_start": 3}, "routed_experts_prompt_start", "is not supported"),
    (chat, {"chat_template": "x"}, "chat_template", "is not supported"),
    (chat, {"messages": None}, "messages", "messages is required"),
    (chat, {"messages": []}, "messages", "must not be empty"),
    (chat, {"messages": "hi"}, "messages", "must be a list, got a string"),
    (chat, {"messages": ["hi"]}, "messages", "entry 0 must be an object"),
    (chat, {"messages": [{"content": "x"}]}, "messages", "entry 0 must have a role"),
    (chat, {"messages": [{"role": "user", "content": 5}]}, "messages", "text as content, got a number"),
    (chat, {"messages": [{"role": "robot", "content": "x"}]}, "messages", "role must be system, user or assistant"),
    (
        chat,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "entry 0 part 0 has type 'image_url'; only text is supported",
    ),
    (chat, {"messages": [{"role": "user", "content": "x" * 4000}]}, "messages", "exceeds the model's context"),
    (chat, {"continue_final_message": True}, "continue_final_message", "cannot both be true"),
    (chat, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set messages"),
    (chat, {"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
]


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "message"), REFUSED, ids=[f"{row[2]}-{place}" for place, row in enumerate(REFUSED)]
)
def test_refusals(served: Served, endpoint: Any, body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        endpoint(served, **body)
    assert raised.value.param == param
    assert raised.value.http_status == (404 if isinstance(raised.value, UnknownModel) else 400)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("body", [[], "x", 5, None])
def test_the_body_must_be_an_object(body: object) -> None:
    with pytest.raises(InvalidRequest, match="the body must be an object"):
        parse_body(CompletionRequest, body)


def test_kwargs_cannot_smuggle_arguments(served: Served) -> None:
    """chat_template_kwargs are the template's variables, not arguments of our functions."""
    prepared = chat(served, chat_template_kwargs={"continue_final_message": True, "self": 1, "enable": True})
    assert one(prepared).prompt_token_ids == one(chat(served)).prompt_token_ids


def test_model_without_grammars(served: Served) -> None:
    served = replace(served, model=replace(served.model, supports_grammars=False))
    completion(served, response_format={"type": "text"})
    with pytest.raises(InvalidRequest, match="response_format is not supported by the served model"):
        completion(served, response_format={"type": "json_object"})
