"""The model, its tokenizer and the limits: what a request is checked against, whichever server it came through."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.checkpoint.sampling_defaults import SamplingDefaults


@dataclass(frozen=True)
class AnswerDefaults:
    """Fields that answers have although a request does not set them, under their names in AnswerOptions."""

    return_tokens_as_token_ids: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class ServedModel:
    """The model that requests are checked against.

    reasoning_parser, tool_call_parser: rows of tool_calls/formats.py. reasoning_field: of messages and deltas.
    draft_methods: names a request may ask for, besides "auto" and "off". has_unseen_members: some verifier or drafter
    has not been reached since the start, and may serve other methods. created: Unix time shown by /v1/models.
    """

    name: str
    max_model_len: int
    vocab_size: int
    draft_methods: tuple[str, ...] = ()
    supports_grammars: bool = True
    created: int = 0
    reasoning_parser: str = "none"
    tool_call_parser: str = "none"
    reasoning_field: str = "reasoning"
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    answer_defaults: AnswerDefaults = field(default_factory=AnswerDefaults)
    has_unseen_members: bool = False


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on one request. max_sequences bounds prompts x n."""

    max_n: int = 128
    max_sequences: int = 256
    max_body_bytes: int = 4 * 1024 * 1024
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_grammar_chars: int = 64 * 1024


@dataclass(frozen=True)
class Served:
    """The model, tokenizer and limits that a request is checked against."""

    model: ServedModel
    tokenizer: Tokenizer
    limits: RequestLimits
