"""What a request asks for, under vLLM's names, and as the message of the gRPC door.

Not here: fields that this door does not have (n, echo, prompt_logprobs, include_stop_str_in_output,
skip_special_tokens, words as text in bad_words); the REST door has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from outrider.v1 import common_pb2, gateway_pb2
from shared import sampling_params as shared_params
from shared.errors import InvalidRequest
from shared.sampling_params import Grammar, GrammarKind, SpeculationMode
from shared.wire.params import MODE_TO_WIRE, params_to_wire

# Text, token ids, or the messages of a chat ({"role": ..., "content": ...}).
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of them. json: a schema, as an object or as text; grammar: in Lark's notation."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def to_grammar(self) -> Grammar:
        """Raises InvalidRequest unless exactly one is given."""
        found: list[Grammar] = []
        if self.json is not None:
            text = self.json if isinstance(self.json, str) else json.dumps(self.json)
            found.append(Grammar(GrammarKind.JSON_SCHEMA, text))
        if self.regex is not None:
            found.append(Grammar(GrammarKind.REGEX, self.regex))
        if self.choice is not None:
            found.append(Grammar(GrammarKind.CHOICE, json.dumps(list(self.choice))))
        if self.grammar is not None:
            found.append(Grammar(GrammarKind.LARK, self.grammar))
        if self.json_object:
            found.append(Grammar(GrammarKind.JSON_OBJECT, ""))
        if len(found) != 1:
            raise InvalidRequest(
                "structured_outputs takes exactly one of json, regex, choice, grammar and json_object",
                param="structured_outputs",
            )
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How the request is drafted; what is empty, 0 or None is the server's default. mode: "exact" or "rejection"."""

    method: str = ""
    num_speculative_tokens: int = 0
    mode: str = ""
    token_tree: bool | None = None

    def to_message(self) -> gateway_pb2.Speculation:
        modes = {mode.value: MODE_TO_WIRE[mode] for mode in SpeculationMode}
        if self.mode and self.mode not in modes:
            raise InvalidRequest(f"speculation.mode must be exact or rejection, got {self.mode!r}", param="speculation")
        return gateway_pb2.Speculation(
            method=self.method,
            num_speculative_tokens=self.num_speculative_tokens,
            mode=modes.get(self.mode, common_pb2.SPECULATION_MODE_UNSPECIFIED),
            token_tree=self.token_tree,
        )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued. Names and defaults of vLLM's SamplingParams; ranges are checked when it is used.

    stop: texts that end the output and are left out of it. top_k: 0 or -1 keeps everything. logprobs: 0 is the chosen
    token's alone, k also those of the k likeliest. bad_words: token id sequences that must not come.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    speculation: Speculation = Speculation()
    # Prompts share cached prefixes only with prompts of the same salt.
    cache_salt: str = ""

    def to_shared(self) -> shared_params.SamplingParams:
        """The services' own value. Raises InvalidRequest that names the field out of range."""
        params = shared_params.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            bad_words=tuple(tuple(word) for word in self.bad_words),
            allowed_token_ids=tuple(self.allowed_token_ids),
            num_logprobs=self.logprobs,
            grammar=self.structured_outputs.to_grammar() if self.structured_outputs is not None else None,
        )
        params.validate()
        return params


def generate_message(
    request_id: str, prompt: Prompt, params: SamplingParams, model: str = ""
) -> gateway_pb2.GenerateRequest:
    """The request as it goes out. Raises InvalidRequest."""
    try:
        message = gateway_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling_params=params_to_wire(params.to_shared()),
            stop=[params.stop] if isinstance(params.stop, str) else params.stop,
            speculation=params.speculation.to_message(),
            cache_salt=params.cache_salt,
        )
        _set_prompt(message, prompt)
    except (TypeError, ValueError, KeyError) as error:  # protobuf's own words for a wrong type or a number too large
        raise InvalidRequest(f"the request does not fit its message: {error!r}") from None
    return message


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
