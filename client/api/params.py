"""SamplingParams and prompts as the message of the gRPC API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar, cast

from outrider.shared import sampling_params as shared_params
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import SamplingParams, Speculation, StructuredOutputsParams, speculation_fields
from outrider.shared.sampling_params import Grammar, GrammarKind
from outrider.shared.wire import params_to_wire, to_message
from outrider.v1 import common_pb2, gateway_pb2

# Text, token ids, or the messages of a chat ({"role": ..., "content": ...}).
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
ValueT = TypeVar("ValueT")
# Fields that are lists, or None, here and tuples there.
_LISTS = ("stop_token_ids", "allowed_token_ids")

# Fields of SamplingParams that the gRPC API does not have.
_NOT_IN_GRPC = (
    "n",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)


def generate_message(
    request_id: str, prompt: Prompt, params: SamplingParams, model: str = ""
) -> gateway_pb2.GenerateRequest:
    """The request as it goes out. Raises InvalidRequest that names the field."""
    _check_supported(params)
    try:
        message = gateway_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling_params=params_to_wire(_shared_params(params)),
            stop=[params.stop] if isinstance(params.stop, str) else params.stop,
            speculation=to_message(common_pb2.Speculation(), Speculation.of(speculation_fields(params))),
            cache_salt=params.cache_salt,
            prediction=params.prediction,
        )
        _set_prompt(message, prompt)
    except (TypeError, ValueError, KeyError) as error:  # protobuf's own words for a wrong type or a number too large
        raise InvalidRequest(f"the request does not fit its message: {error!r}") from None
    return message


def _shared_params(params: SamplingParams) -> shared_params.SamplingParams:
    """The services' own value. Raises InvalidRequest that names the field out of range, or not in the gRPC API."""
    structured = params.structured_outputs
    names = {entry.name for entry in fields(shared_params.SamplingParams)} - set(_NOT_IN_GRPC)
    same = {entry.name: getattr(params, entry.name) for entry in fields(params) if entry.name in names}
    lists = {name: _tuple(value) for name, value in same.items() if name in _LISTS}
    converted: dict[str, Any] = {
        "top_k": 0 if params.top_k == -1 else params.top_k,
        "max_tokens": _max_tokens(params),
        "logit_bias": tuple(sorted((params.logit_bias or {}).items())),
        "bad_words": _bad_words(params),
        "num_logprobs": params.logprobs,
        "grammar": _grammar(structured) if structured is not None else None,
    }
    value = shared_params.SamplingParams(**{**same, **lists, **converted})
    value.validate()
    return value


def _check_supported(params: SamplingParams) -> None:
    defaults = SamplingParams()
    for name in _NOT_IN_GRPC:
        if getattr(params, name) not in (None, getattr(defaults, name)):
            raise InvalidRequest(f"{name} is not supported by the gRPC API", param=name)


def _max_tokens(params: SamplingParams) -> int:
    if params.max_tokens is None:
        raise InvalidRequest("max_tokens must be given: None is not supported by the gRPC API", param="max_tokens")
    return params.max_tokens


def _bad_words(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    words = _tuple(params.bad_words)
    if any(isinstance(word, str) for word in words):
        raise InvalidRequest("bad_words must be token ids: text is not supported by the gRPC API", param="bad_words")
    return tuple(tuple(word) for word in cast("Sequence[Sequence[int]]", words))


def _tuple(values: Sequence[ValueT] | None) -> tuple[ValueT, ...]:
    return () if values is None else tuple(values)


def _grammar(given: StructuredOutputsParams | Mapping[str, Any]) -> Grammar:
    """Converts the output's constraint. Raises InvalidRequest unless exactly one field is given."""
    if isinstance(given, Mapping):
        unknown = given.keys() - {entry.name for entry in fields(StructuredOutputsParams)}
        if unknown:
            name = sorted(unknown)[0]
            raise InvalidRequest(f"structured_outputs.{name} is not a known field", param="structured_outputs")
        given = StructuredOutputsParams(**given)
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            raise InvalidRequest(
                f"structured_outputs.{name} is not supported by the gRPC API", param="structured_outputs"
            )
    found: list[Grammar] = []
    if given.json is not None:
        text = given.json if isinstance(given.json, str) else json.dumps(given.json)
        found.append(Grammar(GrammarKind.JSON_SCHEMA, text))
    if given.regex is not None:
        found.append(Grammar(GrammarKind.REGEX, given.regex))
    if given.choice is not None:
        found.append(Grammar(GrammarKind.CHOICE, json.dumps(list(given.choice))))
    if given.grammar is not None:
        found.append(Grammar(GrammarKind.LARK, given.grammar))
    if given.json_object:
        found.append(Grammar(GrammarKind.JSON_OBJECT, ""))
    if len(found) != 1:
        raise InvalidRequest(
            "structured_outputs takes exactly one of json, regex, choice, grammar and json_object",
            param="structured_outputs",
        )
    return found[0]


def _set_prompt(message: gateway_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.prompt = prompt
    elif not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    elif isinstance(prompt[0], Mapping):
        for entry in cast("Sequence[Mapping[str, str]]", prompt):
            message.messages.messages.add(role=entry["role"], content=entry["content"])
    else:
        message.prompt_token_ids.token_ids.extend(cast("Sequence[int]", prompt))
