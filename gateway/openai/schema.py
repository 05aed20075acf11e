"""The bodies of /v1/completions, /v1/chat/completions, /tokenize and /detokenize, as OpenAI and vLLM define them.

null means "not given". A known but unsupported field is refused by name if its value has an effect.
Fields that cannot change the output are accepted; unknown fields are ignored. Not here: checks that need the model
(convert.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)

from outrider.gateway.openai.fields import (
    Bool,
    Int,
    JsonObject,
    LogitBias,
    Number,
    Prompts,
    String,
    StringOrStrings,
    Strings,
    TokenIds,
    json_kind,
)
from outrider.gateway.openai.messages import Messages, PredictedContent
from outrider.gateway.tool_calls.fields import ToolChoiceField, ToolList
from outrider.shared import request_params
from outrider.shared.errors import InvalidRequest

log = logging.getLogger(__name__)

# These cannot change the visible output.
_IGNORABLE = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        "verbosity",
        "spaces_between_special_tokens",
        "stream_interval",
        "return_mm_kwargs",
    }
)
# Unsupported fields of OpenAI or vLLM, with the values that have no effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "priority": (0,),
    "return_token_offsets": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "routed_experts_prompt_start": (0,),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "watermarking": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "thinking_token_budget": (-1,),
    "prompt_embeds": (),
}
_UNSUPPORTED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "return_prompt_text": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def _same_json(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Unsupported field to what to send in its place.
    instead: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"must be an object, got {json_kind(value)}")
        given = {name: entry for name, entry in value.items() if entry is not None}
        for name in cls.unsupported.keys() & given.keys():
            if not any(_same_json(given[name], harmless) for harmless in cls.unsupported[name]):
                advice = f"; use {cls.instead[name]}" if name in cls.instead else ""
                raise InvalidRequest(f"{name} is not supported{advice}", param=name)
        if log.isEnabledFor(logging.DEBUG):
            unknown = given.keys() - cls.model_fields.keys() - cls.unsupported.keys() - _IGNORABLE
            if unknown:
                shown = [name[:64] for name in sorted(unknown)[:20]]  # names may be many and long
                log.debug("%s: ignored fields %s", cls.__name__, shown)
        return given


class StreamOptions(Body):
    include_usage: Bool = False
    continuous_usage_stats: Bool = Field(False, description="with include_usage: in every event")


# Python type of an option to the type of its field.
_OPTION_FIELDS = {str: String, int: Int, bool | None: Bool}


def _option_fields(options: type[request_params.Speculation]) -> dict[str, Any]:
    kinds = get_type_hints(options)
    return {
        entry.name: (_OPTION_FIELDS[kinds[entry.name]] | None, Field(None, description=entry.metadata["description"]))
        for entry in fields(options)
    }


_Options: Any = create_model("_Options", __base__=Body, **_option_fields(request_params.Speculation))


class Speculation(_Options):  # type: ignore[misc]  # its fields are those of request_params.Speculation
    """Outrider's own: draft method, draft length, guarantee, and whether the answer has the origin of each token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    annotate: Bool = Field(False, description="choices include the origin of each token")

    def options(self) -> request_params.Speculation:
        """Returns the options that concern drafting. Raises InvalidRequest."""
        given: dict[str, Any] = self.model_dump(exclude={"annotate"}, exclude_none=True)
        return request_params.Speculation.of(given)


class ResponseFormat(Body):
    type: String
    json_schema: JsonObject | None = None


class StructuredOutputs(Body):
    """Exactly one of the first five, under vLLM's names; the others are options of JSON."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"structural_tag": ()}

    json_: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})] = Field(
        None, alias="json"
    )
    regex: String | None = None
    choice: Strings | None = None
    grammar: String | None = Field(None, description="in Lark's notation or in GBNF")
    json_object: Bool = False
    disable_any_whitespace: Bool = False
    disable_additional_properties: Bool = False
    whitespace_pattern: String | None = Field(None, description="a regular expression")


class Prediction(Body):
    """The output as far as the caller can predict it, such as a file to edit. It makes drafts and changes no token."""

    type: String = "content"
    content: PredictedContent


class GenerationFields(Body):
    """The fields of both generating endpoints."""

    model: String | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = Field(None, description="-1 and 0 keep everything")
    min_p: Number | None = None
    seed: Int | None = Field(None, description="-1 is no seed, as in vLLM; other negative seeds are taken modulo 2^64")
    n: Int = 1
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    min_tokens: Int = 0
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    stop: StringOrStrings = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: Bool = False
    ignore_eos: Bool = False
    skip_special_tokens: Bool = True
    bad_words: Strings = ()
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: TokenIds = Field(
        (), description="with logprobs: of these tokens and the chosen one, in place of the likeliest"
    )
    truncate_prompt_tokens: Int | None = Field(None, description="-1: as many as the context allows")
    truncation_side: String = "left"
    stream: Bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: String | None = Field(None, description="part of the answer's id, by which a stream is resumed")
    cache_salt: String | None = None
    prediction: Prediction | None = None
    return_token_ids: Bool = False
    return_tokens_as_token_ids: Bool | None = Field(
        None, description="log-probabilities name tokens as `token_id:N`; the server's default if left out"
    )
    receipt: Bool = Field(
        False, description="the answer has a receipt, which `outrider verify` checks; exact mode only"
    )
    speculation: Speculation | None = None


class CompletionRequest(GenerationFields):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED_IN_COMPLETIONS

    best_of: Int | None = Field(None, description="n, if given")
    prompt: Prompts
    suffix: String | None = Field(
        None, description="text behind the gap that the output fills; for models with tokens for it"
    )
    echo: Bool = False
    logprobs: Int | None = None
    add_special_tokens: Bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest(
                f"best_of is {self.best_of}, only the same as n is supported: {self.n}", param="best_of"
            )
        return self


class ChatFields(Body):
    messages: Messages
    add_generation_prompt: Bool = True
    continue_final_message: Bool = False
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: String | None = Field(None, description="none, minimal, low, medium, high, xhigh or max")
    tools: ToolList = ()
    add_special_tokens: Bool = False


class ChatCompletionRequest(GenerationFields, ChatFields):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED_IN_CHAT
    instead: ClassVar[Mapping[str, str]] = {"functions": "tools", "function_call": "tool_choice"}

    echo: Bool = Field(False, description="the answer begins with the last message, if that is the assistant's")
    logprobs: Bool = False
    top_logprobs: Int | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: Bool = True
    include_reasoning: Bool = True
    thinking_token_budget: Int | None = Field(
        None, description="tokens of reasoning, markers not counted; -1: no limit"
    )


class TokenizeRequest(Body):
    model: String | None = None
    prompt: String
    add_special_tokens: Bool = True
    return_token_strs: Bool = False


class TokenizeChatRequest(ChatFields):
    model: String | None = None
    return_token_strs: Bool = False


class DetokenizeRequest(Body):
    model: String | None = None
    tokens: TokenIds
    skip_special_tokens: Bool = False


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], body: object) -> BodyT:
    """Raises InvalidRequest: one sentence about the first problem; `param` names the field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _one_sentence(error) from None


def _one_sentence(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    name = param or "the body"
    if first["type"] == "missing":
        message = f"{name} is required"
    elif first["type"] == "extra_forbidden":
        message = f"{name} is not a known field"
    elif first["type"] == "value_error":
        message = f"{name} {first['ctx']['error']}"
    else:
        message = f"{name}: {first['msg']}"
    return InvalidRequest(message, param=param or None)
