"""vLLM's SamplingParams: its names and defaults. What they mean, and their ranges, is what the OpenAI door says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import InvalidRequest


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """Exactly one of them. json: a schema, as an object or as text; grammar: in Lark's notation."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(kw_only=True)
class SamplingParams:
    """How one prompt is continued; checked when it is used. A value of None is "not given".

    max_tokens: None, or more than the context has room for, is all of that room, as in vLLM.
    extra_args: {"speculation": {...}} is the field `speculation` of the OpenAI door: method ("off", ...),
    num_speculative_tokens, mode, token_tree.
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
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As fields of the body of /v1/completions. Raises InvalidRequest on an extra argument that is not known."""
        unknown = self.extra_args.keys() - {"speculation"}
        if unknown:
            raise InvalidRequest(f"extra_args: {sorted(unknown)[0]!r} is not known, only speculation is")
        given = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        del given["extra_args"]
        structured = given["structured_outputs"]
        if isinstance(structured, StructuredOutputsParams):
            given["structured_outputs"] = dataclasses.asdict(structured)
        return {**given, **self.extra_args}
