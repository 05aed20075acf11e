"""POST /v1/receipts/verify: an answer's tokens drawn again by a verifier of this fleet, from the answer's receipt.

It is a request like any other: admitted, charged, in its caller's share of the verifiers, and over when the client
hangs up. Of one caller, one choice of one receipt is worked on at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.admission.auth import Caller, caller_of
from outrider.gateway.admission.quotas import metered
from outrider.gateway.answers.check import Form, Verification, check_receipt, other_part, redrawn
from outrider.gateway.openai.answer_types import VerifiedReceipt
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.servers.http.body_work import BodyWork
from outrider.gateway.servers.http.http_answer import Load, until_disconnect
from outrider.gateway.servers.http.limits import as_outrider_error, error_response, parse_json
from outrider.gateway.servers.service import GatewayService
from outrider.shared.errors import InvalidRequest
from outrider.shared.machine.memory import collection_paused, let_go

# The body, for the OpenAPI document: any API's answer.
ANSWER_SCHEMA = {"type": "object", "required": ["receipt"], "properties": {"receipt": {"type": "object"}}}
# tokens; confirmed by a forward besides one; with 32, short requests of others took 3 to 5 times as long as alone, with
# 4 about twice (`python -m tests.attacks`, 2 cores with AVX2)
NUM_AHEAD = 4

T = TypeVar("T")


class Receipts:
    def __init__(self, service: GatewayService, work: BodyWork, load: Load) -> None:
        self._service = service
        self._work = work
        self._load = load
        # by caller; one of its receipts is parsed, drawn or compared at a time: each keeps others waiting a little
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def verify(self, request: Request) -> Response:
        # As JSON, an answer takes a tenth of the memory, for as long as it waits and its tokens are drawn.
        body, caller = await self._work.kept(request), caller_of(request)
        turn = self._turns.setdefault(caller.name, asyncio.Semaphore())

        async def work() -> Verification:
            async with turn:
                return await self._verified(body, caller)

        return _Verified(work, self._load)

    async def _verified(self, body: bytes, caller: Caller) -> Verification:
        served = self._service.served

        def parsed(answer: object) -> tuple[Form, Receipt]:
            if not isinstance(answer, Mapping):
                raise InvalidRequest("the body must be an answer with a receipt, or its receipt alone", param="receipt")
            receipt = Receipt.parse(answer.get("receipt"))
            check_receipt(receipt, served)
            return Form.of(answer), receipt

        async def compare(made: Callable[[], object]) -> str:
            return await self._work.aside(lambda: _of_json(body, lambda said: _compared(made(), said)), len(body))

        form, receipt = await self._work.aside(lambda: _of_json(body, parsed), len(body))
        self._check_kind(receipt)
        generate = metered(self._service, caller.account).generate
        names = {"owner": caller.owner, "caller": caller.name}
        return await redrawn(receipt, form, compare, generate, served.tokenizer, num_ahead=NUM_AHEAD, **names)

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


def _compared(made: object, said: Any) -> str:
    difference = other_part(made, said)
    let_go(made)
    return difference


def _of_json(body: bytes, work: Callable[[Any], T]) -> T:
    """Applies `work` to the body's JSON, which is then freed. Other threads never wait for all of it."""
    with collection_paused():
        value = parse_json(body)
        try:
            return work(value)
        finally:
            let_go(value)


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
