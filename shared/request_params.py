"""The parameters of a request, under vLLM's names: one class for the Python client and for offline use.

Not here: the services' own validated value (sampling_params.py), the gRPC message (client/api/params.py) and the
body of the OpenAI API (offline/prompts.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import SpeculationMode

# draft tokens per round that a request or a server's default may ask for; a tree of 64 nodes is the verifier's most
MAX_SPECULATIVE_TOKENS = 32


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output's structure: exactly one of the first five fields.

    json: a schema, as an object or as text. grammar: in Lark's notation or GBNF. The others are options of `json` and
    `json_object`; the client, whose gRPC API has the schema alone, refuses them.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RequestOutputKind(enum.Enum):
    """The outputs that AsyncLLM yields: all of an output so far, what is new of it, or only the finished one."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _option(
    default: Any,
    description: str,
    *,
    choices: Sequence[str] = (),
    limits: tuple[int, int] | None = None,
    advice: str = "",
) -> Any:
    """A field of Speculation. limits: smallest and largest number; the default need not be between them."""
    allowed = {"choices": choices, "limits": limits, "advice": advice}
    return field(default=default, metadata={"description": description, **allowed})


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The speculation options of a request; the default of each field is the server's choice.

    One value from the API to the service that reads a field of it: the message `Speculation` has the same fields
    (wire/fields.py), the HTTP schema takes them from here (gateway/openai/schema.py).
    """

    method: str = _option("", '"auto", "off" or a draft method that the server offers')
    num_speculative_tokens: int = _option(
        0,
        "maximum draft tokens per round",
        limits=(1, MAX_SPECULATIVE_TOKENS),
        advice='; method "off" turns speculation off',
    )
    mode: str = _option("", '"exact" or "rejection"', choices=[mode.value for mode in SpeculationMode])
    token_tree: bool | None = _option(None, "draft tokens as a tree; num_speculative_tokens caps its nodes")
    learn: bool | None = _option(
        None, "false keeps a server that learns from its traffic from learning from this request"
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Speculation:
        """Parses what is given, by name. Raises InvalidRequest that names the first field unknown or out of range."""
        known = {entry.name: entry.metadata for entry in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InvalidRequest(f"speculation.{name} is not a known field", param=f"speculation.{name}")
            _check_option(f"speculation.{name}", value, **known[name])
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """The fields that are not left to the server, by name."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) != entry.default}

    def validate(self) -> None:
        """Raises InvalidRequest that names the first field out of range."""
        self.of(self.given())


def _check_option(
    param: str, value: Any, *, description: str, choices: Sequence[str], limits: tuple[int, int] | None, advice: str
) -> None:
    if choices and value not in choices:
        raise InvalidRequest(f"{param} {value[:80]!r} is not one of {', '.join(choices)}{advice}", param=param)
    if limits is not None and not limits[0] <= value <= limits[1]:
        raise InvalidRequest(f"{param} must be between {limits[0]} and {limits[1]}, got {value}{advice}", param=param)


@dataclass(kw_only=True)
class SamplingParams:
    """The sampling parameters of a prompt, with vLLM's names and defaults. Ranges are checked when they are used.

        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])
        params.seed = 7

    None, where a field takes it, is "not given".

    * top_k: 0 or -1 keeps everything.
    * stop: texts that end the output and are left out of it.
    * max_tokens: None, or more than the context has room for, is all of that room (LLM only).
    * logprobs: 0 is the chosen token's alone, k also those of the k likeliest.
    * bad_words: what must not come, as text (LLM) or as token id sequences (client).
    * speculation, or extra_args={"speculation": {...}}: how the request is drafted. No other extra argument is known.
    * cache_salt: prompts share cached prefixes only with prompts of the same salt.
    * prediction: what the output will be, as far as it is known; drafts are taken from it.
    * output_kind: of AsyncLLM alone; the others return finished outputs, or their own streams.

    The client refuses the fields that the gRPC API does not have, with InvalidRequest that names the field: n,
    prompt_logprobs, include_stop_str_in_output, skip_special_tokens, spaces_between_special_tokens and
    truncate_prompt_tokens.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | Sequence[Sequence[int]] | None = None
    extra_args: Mapping[str, Any] | None = field(default_factory=dict)
    speculation: Speculation | Mapping[str, Any] = Speculation()
    cache_salt: str = ""
    prediction: str = ""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


def speculation_fields(params: SamplingParams) -> dict[str, Any]:
    """Returns the given fields of `speculation`, from there or from extra_args, by name.

    Raises InvalidRequest when it is given in both, and for an extra argument that is not known.
    """
    extra_args = params.extra_args or {}
    unknown = extra_args.keys() - {"speculation"}
    if unknown:
        raise InvalidRequest(f"extra_args: {sorted(unknown)[0]!r} is not known, only speculation is")
    by_field, by_extra = _given(params.speculation), _given(extra_args.get("speculation"))
    if by_field and by_extra:
        raise InvalidRequest("give speculation or extra_args['speculation'], not both", param="speculation")
    return by_field or by_extra


def _given(speculation: object) -> dict[str, Any]:
    if speculation is None:
        return {}
    if isinstance(speculation, Speculation):
        return speculation.given()
    if isinstance(speculation, Mapping):
        return {name: value for name, value in speculation.items() if value is not None}
    raise InvalidRequest(
        f"speculation must be a Speculation or a mapping, got {type(speculation).__name__}", param="speculation"
    )
