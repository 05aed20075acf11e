"""The gateway's interface for its two servers (REST, gRPC), and nothing more."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from outrider.gateway.admission.readiness import ReadyState
from outrider.gateway.fleet.view import FleetView
from outrider.gateway.openai.receipt_signature import ReceiptKey
from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.answers import AnswerKind, Prepared, Wanted
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.gateway.responses.store import ResponseStore


class GatewayService(Protocol):
    """Contract: attributes are cheap and may change between calls; they raise Unavailable while they are unknown.
    `response_store` is None where no responses are stored, `receipt_key` where receipts are not signed.

    A request is begun, or resumed, as a whole, which fills in the `starts` of its prompts; then each prompt that has
    some is generated. `resume` takes the request away from whoever was being sent it, and raises UnknownSession when
    there is none of this id and owner. The servers check owners.

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
    def served(self) -> Served: ...

    @property
    def response_store(self) -> ResponseStore | None: ...

    @property
    def spec_metrics(self) -> SpecMetricsLevel: ...

    @property
    def receipt_key(self) -> ReceiptKey | None: ...

    @property
    def version(self) -> str: ...

    def begin(self, kind: AnswerKind, prepared: Prepared) -> Prepared: ...

    async def resume(self, wanted: Wanted) -> Prepared: ...

    def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]: ...

    def ready(self) -> ReadyState: ...

    def render_metrics(self) -> bytes: ...

    def fleet(self) -> FleetView: ...
