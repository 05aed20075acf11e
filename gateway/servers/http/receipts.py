"""POST /v1/receipts/verify: an answer's tokens drawn again by a verifier of this fleet, from the answer's receipt.

It is a request like any other: admitted, charged, in its caller's share of the verifiers, and over when the client
hangs up. At most one choice of it is drawn at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.admission.auth import caller_of
from outrider.gateway.admission.quotas import metered
from outrider.gateway.answers.check import Verification, check_receipt, redrawn
from outrider.gateway.openai.answer_types import VerifiedReceipt
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.servers.http.body_work import BodyWork
from outrider.gateway.servers.http.http_answer import Load, until_disconnect
from outrider.gateway.servers.http.limits import as_outrider_error, error_response
from outrider.gateway.servers.service import GatewayService
from outrider.shared.errors import InvalidRequest

# The body, for the OpenAPI document: any API's answer.
ANSWER_SCHEMA = {"type": "object", "required": ["receipt"], "properties": {"receipt": {"type": "object"}}}


class Receipts:
    def __init__(self, service: GatewayService, work: BodyWork, load: Load) -> None:
        self._service = service
        self._work = work
        self._load = load

    async def verify(self, request: Request) -> Response:
        served = self._service.served

        def parsed(body: object) -> tuple[Mapping[str, Any], Receipt]:
            if not isinstance(body, Mapping):
                raise InvalidRequest("the body must be an answer with a receipt, or its receipt alone", param="receipt")
            receipt = Receipt.parse(body.get("receipt"))
            check_receipt(receipt, served)
            return body, receipt

        answer, receipt = await self._work.parsed(request, parsed)
        self._check_kind(receipt)
        caller = caller_of(request)
        service = metered(self._service, caller.account)
        names = {"owner": caller.owner, "caller": caller.name}
        return _Verified(lambda: redrawn(answer, receipt, service.generate, service.tokenizer, **names), self._load)

    def _check_kind(self, receipt: Receipt) -> None:
        """Raises InvalidRequest unless a verifier of the receipt's kind serves, or none does and one is waited for."""
        wanted = receipt.record.numerics
        here = sorted({member["numerics"] for member in self._service.fleet()["verifiers"] if member["healthy"]})
        if wanted is not None and here and wanted not in here:
            raise InvalidRequest(
                f"receipt: it is of a verifier with numerics {wanted or 'unreported'}, those here have "
                f"{', '.join(kind or 'unreported' for kind in here)}: other weights or arithmetic draw other tokens",
                param="receipt",
            )


class _Verified(Response):
    """An ASGI response: the work is cancelled when the client disconnects."""

    def __init__(self, work: Callable[[], Awaitable[Verification]], load: Load) -> None:
        super().__init__()
        self._work = work
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._load.num_running += 1
        try:
            await until_disconnect(self._answer(scope, receive, send), receive)
        finally:
            self._load.num_running -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = await self._work()
        except Exception as error:
            await error_response(as_outrider_error(error), scope["path"])(scope, receive, send)
            return
        body: VerifiedReceipt = {
            "confirmed": found.exit_code == 0,
            "num_tokens": found.num_tokens,
            "said": found.conclusion,
        }
        await JSONResponse(body)(scope, receive, send)
