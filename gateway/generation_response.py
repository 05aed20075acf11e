"""Runs the generation of one HTTP request and sends its answer, whole or as server-sent events.

The generators are closed the moment the client hangs up, whether anything is being sent or not. An error before the
first token is an HTTP status; one after it is an event, and the stream ends without its end mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answer_stream import AnswerStream
from gateway.event_cursor import NOTHING_SEEN, EventCursor
from gateway.http_limits import as_outrider_error, error_body, error_response
from gateway.openai_convert import Prepared
from gateway.requests import GenerationUpdate, ValidRequest
from gateway.responses import WholeAnswer, to_json
from gateway.service import GatewayService, SpecMetricsLevel
from gateway.tokenizer import Tokenizer
from gateway.tracing import ending

Indexed = tuple[int, GenerationUpdate]
# Per request with several prompts: updates made before the reader took the earlier ones.
_MAX_QUEUED_UPDATES = 64


@dataclass
class Load:
    """Requests that are being generated now, for GET /load."""

    num_running: int = 0


async def merged_updates(service: GatewayService, requests: tuple[ValidRequest, ...]) -> AsyncGenerator[Indexed, None]:
    """The updates of all prompts as they come, each with its prompt's index. The first error ends all."""
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
            # The reader is gone when this was cancelled: then there is room, or nobody who waits for it.
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
    """None when the pumps are done and the queue is empty."""
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


class GenerationResponse(Response):
    """An ASGI response; the request was validated, and begun or resumed, before it is made.

    `seen`: the client has these events and wants those that follow, as a stream, however the request was begun.
    """

    def __init__(
        self, service: GatewayService, prepared: Prepared, load: Load, *, seen: EventCursor | None = None
    ) -> None:
        super().__init__()
        self._service = service
        self._prepared = prepared
        self._load = load
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._load.num_running += 1
        streams = self._prepared.options.stream or self._seen is not None
        work = self._stream if streams else self._whole
        try:
            with ending(self._prepared.trace):
                await _until_disconnect(work(scope, receive, send), receive)
        finally:
            self._load.num_running -= 1

    def _updates(self) -> aclosing[AsyncGenerator[Indexed, None]]:
        return aclosing(merged_updates(self._service, self._prepared.requests))

    def _parts(self) -> tuple[Prepared, Tokenizer, SpecMetricsLevel, str]:
        return self._prepared, self._service.tokenizer, self._service.spec_metrics, self._service.version

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = WholeAnswer(*self._parts())
            async with self._updates() as updates:
                async for prompt_index, update in updates:
                    answer.add(prompt_index, update)
            response = Response(to_json(answer.body()), media_type="application/json", headers=self._id_header())
        except Exception as error:
            response = error_response(as_outrider_error(error))
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            answer = AnswerStream(*self._parts(), seen=self._seen or NOTHING_SEEN)
            async with self._updates() as updates:
                async for prompt_index, update in updates:
                    if not started:
                        await _send(send, self._start())
                        started = True
                    events = answer.events(prompt_index, update)
                    if events:
                        await _send(send, _body(events, more=True))
            await _send(send, _body(answer.end(), more=False))
        except ClientDisconnect:
            return
        except Exception as error:
            known = as_outrider_error(error)
            if started:
                event = f"data: {to_json(error_body(known))}\n\n".encode()
                with suppress(ClientDisconnect):
                    await _send(send, _body(event, more=False))
            else:
                await error_response(known)(scope, receive, send)

    def _id_header(self) -> dict[str, str]:
        return {"x-request-id": self._prepared.options.answer_id}

    def _start(self) -> dict[str, Any]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # or nginx collects events before it passes them on
            **self._id_header(),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _send(send: Send, message: dict[str, Any]) -> None:
    """Some servers raise OSError when the client is gone; an OSError of the generation must not look like it."""
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error


async def _until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`; cancels it, and waits until it has cleaned up, when the client hangs up."""
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
