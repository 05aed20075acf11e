"""What the two doors (REST, gRPC) need from the gateway behind them, and nothing more."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.requests import GenerationUpdate, ValidRequest
from gateway.tokenizer import Tokenizer

if TYPE_CHECKING:  # they check against what is served, so they import this file
    from gateway.fleet_view import FleetView
    from gateway.openai_convert import Prepared
    from gateway.request_start import Wanted
    from gateway.session_record import AnswerKind


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

    A request is begun, or resumed, as a whole, which fills in the `starts` of its prompts; then each prompt that has
    some is generated. `resume` takes the request away from whoever was being sent it, and raises UnknownSession when
    there is none of this id and owner. Owners are the doors' to check.

    `generate` yields the updates of the choices in `starts`, interleaved as they come, what was logged before first;
    the last one of each choice carries `finish_reason`. Closing the generator (`aclose`, or a cancelled `anext`) ends
    the sessions and frees all they hold. Errors are OutriderErrors; one raised before the first update becomes an HTTP
    or gRPC status.
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

    def begin(self, kind: AnswerKind, prepared: Prepared) -> Prepared: ...

    async def resume(self, wanted: Wanted) -> Prepared: ...

    def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]: ...

    def ready(self) -> ReadyState: ...

    def render_metrics(self) -> bytes: ...

    def fleet(self) -> FleetView: ...
