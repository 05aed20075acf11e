"""The bodies of /v1/completions, /v1/chat/completions, /tokenize and /detokenize, as OpenAI and vLLM define them.

null means "not given". A field that is known there and not served here is refused by name when it asks for something;
fields that cannot change the output are accepted; unknown fields are ignored, as both do. Not here: checks that need
the model (openai_convert.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from gateway.openai_fields import (
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
from shared.errors import InvalidRequest

log = logging.getLogger(__name__)

# They can change nothing that the caller sees in the output.
_IGNORABLE = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
        "prediction",
        "parallel_tool_calls",
        "include_reasoning",
        "spaces_between_special_tokens",
        "stream_interval",
    }
)
# Fields of OpenAI or vLLM that are not served here, and the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
}
_UNSUPPORTED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def _same_json(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"must be an object, got {json_kind(value)}")
        given = {name: entry for name, entry in value.items() if entry is not None}
        for name in cls.unsupported.keys() & given.keys():
            if not any(_same_json(given[name], harmless) for harmless in cls.unsupported[name]):
                raise InvalidRequest(f"{name} is not supported", param=name)
        if log.isEnabledFor(logging.DEBUG):
            unknown = given.keys() - cls.model_fields.keys() - cls.unsupported.keys() - _IGNORABLE
            if unknown:
                shown = [name[:64] for name in sorted(unknown)[:20]]  # a body may have any number, of any length
                log.debug("%s: ignored fields %s", cls.__name__, shown)
        return given


class StreamOptions(_Body):
    include_usage: Bool = False
    continuous_usage_stats: Bool = False


class Speculation(_Body):
    """Outrider's own: which drafter, how many tokens, which promise, and whether the answer says what came whence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: String | None = Field(None, description='"auto", "off" or a draft method of the server')
    num_speculative_tokens: Int | None = Field(None, description="the most draft tokens per round")
    mode: String | None = Field(None, description='"exact" or "rejection"')
    token_tree: Bool | None = Field(None, description="draft tokens as a tree; num_speculative_tokens caps its nodes")
    annotate: Bool = Field(False, description="choices carry the origin of each token")


class ResponseFormat(_Body):
    type: String
    json_schema: JsonObject | None = None


class StructuredOutputs(_Body):
    """Exactly one of these, under vLLM's names."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"structural_tag": ()}

    json_: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})] = Field(
        None, alias="json"
    )
    regex: String | None = None
    choice: Strings | None = None
    grammar: String | None = None
    json_object: Bool = False


class GenerationFields(_Body):
    """What both generating endpoints take."""

    model: String | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = Field(None, description="-1 and 0 keep everything")
    min_p: Number | None = None
    seed: Int | None = Field(None, description="-1 is no seed, as in vLLM; other negative seeds count modulo 2^64")
    n: Int = 1
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    min_tokens: Int = 0
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    logit_bias: LogitBias | None = None
    stop: StringOrStrings = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: Bool = False
    ignore_eos: Bool = False
    skip_special_tokens: Bool = True
    bad_words: Strings = ()
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = Field(None, description="-1: as many as the context allows")
    truncation_side: String = "left"
    stream: Bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: String | None = None
    cache_salt: String | None = None
    return_token_ids: Bool = False
    speculation: Speculation | None = None


class CompletionRequest(GenerationFields):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED_IN_COMPLETIONS

    prompt: Prompts
    echo: Bool = False
    logprobs: Int | None = None
    add_special_tokens: Bool = True


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(part)}")
    kind = part.get("type", "text")
    if kind != "text":
        raise ValueError(f"{where} has type {str(kind)[:40]!r}; only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{where} must have a text, got {json_kind(text)}")
    return text


def _message(message: object, where: str) -> dict[str, Any]:
    """Text parts are joined by newlines, as vLLM does for templates that take text."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(message)}")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} must have a role")
    content = given.get("content", "")
    if isinstance(content, list):
        parts = [_part_text(part, f"{where} part {place}") for place, part in enumerate(content)]
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise ValueError(f"{where} must have text as content, got {json_kind(content)}")
    return {**given, "role": role, "content": content}


def _messages(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {json_kind(value)}")
    if not value:
        raise ValueError("must not be empty")
    return tuple(_message(message, f"entry {place}") for place, message in enumerate(value))


_MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "name": {"type": "string"},
    },
}
Messages = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(_messages),
    WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE_SCHEMA}),
]


class ChatFields(_Body):
    messages: Messages
    add_generation_prompt: Bool = True
    continue_final_message: Bool = False
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: Bool = False


class ChatCompletionRequest(GenerationFields, ChatFields):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED_IN_CHAT

    logprobs: Bool = False
    top_logprobs: Int | None = None


class TokenizeRequest(_Body):
    model: String | None = None
    prompt: String
    add_special_tokens: Bool = True
    return_token_strs: Bool = False


class TokenizeChatRequest(ChatFields):
    model: String | None = None
    return_token_strs: Bool = False


class DetokenizeRequest(_Body):
    model: String | None = None
    tokens: TokenIds
    skip_special_tokens: Bool = False


BodyT = TypeVar("BodyT", bound=_Body)


def parse_body(kind: type[BodyT], body: object) -> BodyT:
    """Raises InvalidRequest: one sentence on the first thing that is wrong, `param` names the field."""
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
