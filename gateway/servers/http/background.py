"""A response in the background: generated to its end, whether its client reads, hangs up or was answered before.

It is the ordinary answer of its request on a connection that may be gone. A lease in Redis shows that a gateway works
on it; once it has expired, the next gateway to receive a request for the response continues it, from the log. So a
Redis that is away for longer than a commit waits is not its end. The first end that is stored counts: an answer, a
failure with its reason, or a cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import EventCursor
from outrider.gateway.responses.response_stream import WholeResponse
from outrider.gateway.responses.response_types import ResponseBody
from outrider.gateway.responses.store import ResponseStore
from outrider.gateway.responses.stored import document_of, keep
from outrider.gateway.servers.http.http_answer import HttpAnswer, Indexed, Load
from outrider.gateway.servers.http.limits import as_outrider_error
from outrider.gateway.servers.service import GatewayService
from outrider.shared.errors import CommitRefused, InternalError, LogUnavailable, Unavailable


class BackgroundAnswer(HttpAnswer):
    """The answer of a response in the background. answer: for a client that asks for the response as it is so far.
    Without it, a new one's is `queued`, or the stream.
    """

    def __init__(
        self,
        service: GatewayService,
        prepared: Prepared,
        load: Load,
        *,
        seen: EventCursor | None = None,
        answer: Response | None = None,
    ) -> None:
        super().__init__(service, prepared, load, seen=seen)
        if service.response_store is None or prepared.options.response is None:
            raise InternalError("a response in the background needs a store")
        self._store: ResponseStore = service.response_store
        self._plan = prepared.options.response
        self._answer = answer
        self._names = prepared.requests[0].owner, prepared.options.answer_id

    async def begin(self) -> None:
        """Stores a new response, which can be found from now on. Raises CommitRefused or Unavailable."""
        await self._store.begin(*self._names, document_of(self._so_far("in_progress"), self._plan))
        if not self._prepared.options.stream:
            self._answer = JSONResponse(self._so_far("queued"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answer is not None:
            await self._answer(scope, receive, send)
        connection = _Connection(None if self._answer is not None else send)
        await super().__call__(scope, _nothing_more, connection)

    def _updates(self) -> aclosing[AsyncGenerator[Indexed, None]]:
        return aclosing(self._to_the_end())

    async def _to_the_end(self) -> AsyncGenerator[Indexed, None]:
        try:
            with self._store.at_work(*self._names) as ended:
                async with super()._updates() as updates, aclosing(_until(ended, updates)) as until_ended:
                    async for update in until_ended:
                        yield update
        except asyncio.CancelledError:
            await self._store.let_go(*self._names)
            raise
        except (CommitRefused, LogUnavailable):
            raise  # somebody else has it, or will continue it from the log once its lease has expired
        except Exception as error:
            body = self._so_far("failed")
            body["error"] = {"code": "server_error", "message": as_outrider_error(error).message}
            with suppress(Unavailable):  # without Redis, nobody can say that it has failed: it is continued later
                await keep(self._store, self._prepared, body)
            raise

    def _so_far(self, status: str) -> ResponseBody:
        return WholeResponse(self._prepared, self._settings).so_far(status)


async def _until(ended: asyncio.Future[Any], updates: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Indexed, None]:
    """Yields the updates. Raises CommitRefused when the response has got another end meanwhile."""
    while True:
        step: asyncio.Future[Any] = asyncio.ensure_future(anext(updates))
        try:
            await asyncio.wait({step, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
        if step.cancelled():
            raise CommitRefused("the response has been cancelled, deleted or finished elsewhere")
        try:
            update = step.result()
        except StopAsyncIteration:
            return
        yield update


class _Connection:
    """An ASGI `send` to a client that may be gone, or is None."""

    def __init__(self, send: Send | None) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if self._send is None:
            return
        try:
            await self._send(message)
        except OSError:
            self._send = None


async def _nothing_more() -> Message:
    """An ASGI `receive` that never says that the client has gone."""
    await asyncio.Event().wait()
    raise InternalError("nobody sets this event")
