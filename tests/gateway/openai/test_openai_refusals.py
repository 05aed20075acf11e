"""Bodies that are refused: every refusal by its sentence and its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.gateway.openai.schema import CompletionRequest, parse_body
from outrider.gateway.request.served import Served
from outrider.shared.errors import InvalidRequest, UnknownModel
from tests.gateway.openai.prepared import chat, completion, one

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
    (completion, {"structured_outputs": {"json": "[" * 9999}}, "structured_outputs.json", "nested too deeply"),
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
    (
        chat,
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages",
        "entry 0: function_call is not supported; use tool_calls",
    ),
    (chat, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages", "entry 0: audio is not supported"),
    (chat, {"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages", "part 0 has type"),
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
