"""Runs the generation of one HTTP request and sends its answer, whole or as server-sent events.

The generators are closed as soon as the client disconnects. An error before the first token is an HTTP status; a later
one is an event, and the stream ends without its end mark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.answers.forms import answer_stream, whole_answer
from outrider.gateway.openai.answer_body import to_json
from outrider.gateway.openai.usage import AnswerSettings
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor
from outrider.gateway.request.tracing import ending
from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.gateway.responses.response_stream import ResponseStream, WholeResponse
from outrider.gateway.responses.stored import keep
from outrider.gateway.servers.http.limits import as_outrider_error, error_body, error_response
from outrider.gateway.servers.service import GatewayService

Indexed = tuple[int, GenerationUpdate]
# seconds; between two comments of a stream that waits; proxies cut a silent connection after about a minute
WAIT_COMMENT_S = 1.0
# Without the empty line that ends an event: behind one with an id, the openai package takes it for another, and fails.
WAIT_COMMENT = b": waiting for a verifier\n"
# updates; per request with several prompts, buffered while the reader is behind
_MAX_QUEUED_UPDATES = 64


@dataclass
class Load:
    """Number of running requests, for GET /load."""

    num_running: int = 0


async def merged_updates(service: GatewayService, requests: tuple[ValidRequest, ...]) -> AsyncGenerator[Indexed, None]:
    """Yields the updates of all prompts as they come, each with its prompt's index. The first error ends them all."""
    if len(requests) == 1:
        async with aclosing(service.generate(requests[0])) as updates:
            async for update in updates:
                yield 0, update
        return
    queue: asyncio.Queue[Indexed | None] = asyncio.Queue(_MAX_QUEUED_UPDATES)

    async def pump(index: int, request: ValidRequest) -> None:
        async with aclosing(service.generate(request)) as updates:
            async for update in updates:
                await queue.put((index, update))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(pump(index, request))
        finally:
            # After a cancellation the reader is gone: nobody waits for room in the queue.
            if not queue.full():
                queue.put_nowait(None)

    pumps = asyncio.create_task(pump_all())
    try:
        while True:
            entry = await _next_entry(queue, pumps)
            if entry is None:
                break
            yield entry
        await _first_error(pumps)
    finally:
        pumps.cancel()
        await asyncio.gather(pumps, return_exceptions=True)


async def _next_entry(queue: asyncio.Queue[Indexed | None], pumps: asyncio.Task[None]) -> Indexed | None:
    """Returns the queue's next entry; None once the pumps are done and the queue is empty."""
    if pumps.done() and queue.empty():
        return None
    return await queue.get()


async def _first_error(pumps: asyncio.Task[None]) -> None:
    try:
        await pumps
    except* Exception as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class HttpAnswer(Response):
    """An ASGI response for a request that was validated, and begun or resumed, before.

    `seen`: the client has these events; stream those that follow, in whatever form the request began.
    """

    def __init__(
        self, service: GatewayService, prepared: Prepared, load: Load, *, seen: EventCursor | None = None
    ) -> None:
        super().__init__()
        self._service = service
        self._prepared = prepared
        self._load = load
        self._seen = seen
        self._settings = AnswerSettings(service.tokenizer, service.spec_metrics, service.version, service.receipt_key)
        self._num_updates = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._load.num_running += 1
        streams = self._prepared.options.stream or self._seen is not None
        work = self._stream if streams else self._whole
        try:
            with ending(self._prepared):
                await until_disconnect(work(scope, receive, send), receive)
        finally:
            self._load.num_running -= 1

    def _updates(self) -> aclosing[AsyncGenerator[Indexed, None]]:
        return aclosing(merged_updates(self._service, self._prepared.requests))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = whole_answer(self._prepared, self._settings)
            async with self._updates() as updates:
                async for prompt_index, update in updates:
                    answer.add(prompt_index, update)
            body = answer.body()
            await self._keep(answer)
            response = Response(to_json(body), media_type="application/json", headers=self._id_header())
        except Exception as error:
            response = error_response(as_outrider_error(error), scope["path"])
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        comments = asyncio.create_task(self._comment_while_waiting(send))
        try:
            answer = answer_stream(self._prepared, self._settings, self._seen or NOTHING_SEEN)
            async with self._updates() as updates:
                async for prompt_index, update in updates:
                    if not self._num_updates:
                        await _send(send, self._start())
                    self._num_updates += 1
                    events = answer.events(prompt_index, update)
                    if events:
                        await _send(send, _body(self._server_time(update, started) + events, more=True))
            comments.cancel()
            await self._keep(answer)
            await _send(send, _body(answer.end(), more=False))
        except ClientDisconnect:
            return
        except Exception as error:
            comments.cancel()
            known = as_outrider_error(error)
            if self._num_updates:
                with suppress(ClientDisconnect):
                    await _send(send, _body(answer.failed(error_body(known)), more=False))
            else:
                await error_response(known, scope["path"])(scope, receive, send)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)

    async def _keep(self, answer: object) -> None:
        """Stores a response, so that it can be found before the client reads that it has completed."""
        if isinstance(answer, WholeResponse | ResponseStream):
            await keep(self._service.response_store, self._prepared, answer.body())

    def _server_time(self, update: GenerationUpdate, started: float) -> bytes:
        """Returns a comment, if annotations are requested: when the gateway had the tokens, in seconds of this
        connection. It is no part of the event, whose bytes are the same whenever and wherever it is sent.
        """
        if update.replayed or not self._prepared.options.annotate:
            return b""
        return b": server time %.4f s\n" % (update.committed_at_s - started)

    async def _comment_while_waiting(self, send: Send) -> None:
        """Sends comments between updates while no verifier serves; before the first, an error may still be sent."""
        while True:
            num_updates = self._num_updates
            await asyncio.sleep(WAIT_COMMENT_S)
            if not num_updates or self._num_updates > num_updates:
                continue
            if not any(member["healthy"] for member in self._service.fleet()["verifiers"]):
                await _send(send, _body(WAIT_COMMENT, more=True))

    def _id_header(self) -> dict[str, str]:
        return {"x-request-id": self._prepared.options.answer_id}

    def _start(self) -> dict[str, Any]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # or nginx buffers the events
            **self._id_header(),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _send(send: Send, message: dict[str, Any]) -> None:
    """Raises ClientDisconnect for some servers' OSError, which must not look like an OSError of the generation."""
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error


async def until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`; when the client disconnects, cancels it and waits for its cleanup."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = task.done()
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if finished:
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
