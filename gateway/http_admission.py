"""The REST door's guard, an ASGI middleware: keys, quotas, slow bodies, deadlines, readers that do not read.

Everything is decided on the head of the request, before its body is read. A refusal is an answer in OpenAI's shape.

`X-Request-Timeout: SECONDS` ends a request that takes longer, wherever it is: with 504 before the answer has begun,
with an error event in a stream. Nothing of it goes on running.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission import Admission
from gateway.auth import Caller, put_caller
from gateway.http_limits import error_event, error_response
from gateway.http_protocol import ABORT
from gateway.playground.page import PREFIX as PLAYGROUND_PREFIX
from shared.api_keys import ApiKey
from shared.errors import DeadlineExceeded, InvalidRequest, OutriderError, RequestTooSlow

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
_MAX_TIMEOUT_S = 24 * 3600.0
# For those who watch the gateway: they have no key, and they must be answered when it is full.
_OPEN_PATHS = {"/health", "/ping", "/ready", "/readyz"}
_METRICS_PATH = "/metrics"
# The page that asks for the key.
_PAGE_PATH = "/"
# A GET that generates: the rest of a stream.
_STREAMS_PREFIX = "/v1/streams/"
# To tell a client that its time is over; one that does not read is cut instead.
_LAST_WORDS_S = 1.0


class HttpAdmission:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = _WatchedSend(scope, send, self._admission.slow_reader_timeout_s)
        with suppress(ReaderGone):
            await self._answer(scope, receive, watched)

    async def _answer(self, scope: Scope, receive: Receive, watched: _WatchedSend) -> None:
        try:
            headers = Headers(scope=scope)
            key = self._identify(scope["path"], headers)
            timeout_s = _timeout_s(headers.get(TIMEOUT_HEADER))
            admitted = self._admission.quotas.admit(key) if _is_work(scope) else nullcontext(None)
            with admitted as account:
                put_caller(scope, Caller("" if key is None else key.name, account))
                timed = _TimedBody(receive, self._admission.body_timeout_s)
                await self._within(timeout_s, self._app(scope, timed, watched), watched)
        except OutriderError as refusal:  # the application's own errors are answers already
            await error_response(refusal)(scope, receive, watched)

    def _identify(self, path: str, headers: Headers) -> ApiKey | None:
        if path in _OPEN_PATHS or path == _PAGE_PATH or path.startswith(PLAYGROUND_PREFIX):
            return None
        if path == _METRICS_PATH and not self._admission.protect_metrics:
            return None
        return self._admission.identify(headers.get("authorization"))

    async def _within(self, timeout_s: float | None, work: Awaitable[None], watched: _WatchedSend) -> None:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await work
        except TimeoutError:
            if not limit.expired():
                raise
            late = DeadlineExceeded(f"the request took longer than the {timeout_s:g} s that {TIMEOUT_HEADER} gives it")
            if not watched.has_begun:
                raise late from None
            await watched.last_words(error_event(late))


class ReaderGone(OSError):
    """Raised by `send` once the connection was cut; the response takes it for a client that hung up."""


class _WatchedSend:
    """An ASGI `send` that cuts the connection of a client who takes nothing for too long."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._abort: Callable[[], None] | None = scope.get(ABORT)
        self.has_begun = False
        self._is_complete = False
        self._is_event_stream = False

    async def __call__(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            log.warning("a client has not read its answer for %g s and is cut off", self._timeout_s)
            await self._cut()
        if message["type"] == "http.response.start":
            self.has_begun = True
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_event_stream = content_type.startswith(b"text/event-stream")
        elif not message.get("more_body", False):
            self._is_complete = True

    async def last_words(self, event: bytes) -> None:
        """Ends an answer that has begun: a stream with an event, anything else by cutting the connection."""
        if self._is_complete:
            return
        if not self._is_event_stream:
            await self._cut()
        self._timeout_s = _LAST_WORDS_S
        await self({"type": "http.response.body", "body": event, "more_body": False})

    async def _cut(self) -> None:
        if self._abort is not None:
            self._abort()
            await asyncio.sleep(0)  # the server notices that the connection is gone
        raise ReaderGone


class _TimedBody:
    """An ASGI `receive` that gives up on a body that does not arrive; afterwards it waits as long as it takes."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._ends_at = asyncio.get_running_loop().time() + timeout_s
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._ends_at) as limit:
                message = await self._receive()
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestTooSlow(f"the body did not arrive within {self._timeout_s:g} s") from None
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


def _is_work(scope: Scope) -> bool:
    """Whether the request takes a place: it has a body to parse, or it generates."""
    path: str = scope["path"]
    return path not in _OPEN_PATHS and (scope["method"] == "POST" or path.startswith(_STREAMS_PREFIX))


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    with suppress(ValueError):
        seconds = float(text)
        if 0.0 < seconds <= _MAX_TIMEOUT_S:
            return seconds
    raise InvalidRequest(
        f"{TIMEOUT_HEADER} must be a number of seconds, over 0 and at most {_MAX_TIMEOUT_S:g}", param=TIMEOUT_HEADER
    )
