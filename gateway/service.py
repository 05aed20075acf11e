"""What the two doors (REST, gRPC) need from the gateway behind them, and nothing more."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from gateway.requests import GenerationUpdate, ValidRequest
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The model that requests are checked against.

    draft_methods: names a request may ask for, besides "auto" and "off". created: Unix time shown by /v1/models.
    """

    name: str
    max_model_len: int
    vocab_size: int
    draft_methods: tuple[str, ...] = ()
    max_speculative_tokens: int = 32
    supports_grammars: bool = True
    created: int = 0


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on one request. max_sequences bounds prompts x n."""

    max_n: int = 128
    max_sequences: int = 256
    max_body_bytes: int = 4 * 1024 * 1024
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_grammar_chars: int = 64 * 1024


class SpecMetricsLevel(enum.Enum):
    """How much a request's own answer says of its speculation (vLLM's --per-request-spec-decode-metrics)."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"


@dataclass(frozen=True)
class ReadyState:
    ready: bool
    reason: str = ""


class GatewayService(Protocol):
    """Contract: attributes are cheap and may change between calls; they raise Unavailable while they are unknown.

    `generate` yields the updates of all `n` choices, interleaved as they come; the last one of each choice carries
    `finish_reason`. Closing the generator (`aclose`, or a cancelled `anext`) ends the sessions and frees all they hold.
    Errors are OutriderErrors; one raised before the first update becomes an HTTP or gRPC status.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model(self) -> ServedModel: ...

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def spec_metrics(self) -> SpecMetricsLevel: ...

    @property
    def version(self) -> str: ...

    def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]: ...

    def ready(self) -> ReadyState: ...

    def render_metrics(self) -> bytes: ...
