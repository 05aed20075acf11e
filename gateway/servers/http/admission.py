"""Admission on the HTTP server, an ASGI middleware: API keys, quotas, slow bodies, deadlines, clients that do not read.

Everything is decided from the request's headers, before its body is read; a request counts once its body is there, and
may be refused then too. Refusals have OpenAI's error
format, or Anthropic's on its routes.

`X-Request-Timeout: SECONDS` cancels a request that takes longer: with 504 before the answer has begun, with an error
event in a stream.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Container
from contextlib import ExitStack, closing, suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.gateway.admission.auth import Admission, Caller, peer_of_scope, put_caller
from outrider.gateway.admission.body_budget import Held
from outrider.gateway.anthropic.errors import is_messages_path
from outrider.gateway.playground.page import PREFIX as PLAYGROUND_PREFIX
from outrider.gateway.request.event_cursor import LAST_EVENT_ID
from outrider.gateway.servers.http.limits import error_event, error_response
from outrider.gateway.servers.http.protocol import ABORT
from outrider.shared.api_keys import ApiKey
from outrider.shared.errors import DeadlineExceeded, InvalidRequest, OutriderError, RequestTooSlow

log = logging.getLogger(__name__)

# Header in which Anthropic's clients send the key; read on Anthropic's routes only.
_KEY_HEADER = "x-api-key"
TIMEOUT_HEADER = "x-request-timeout"
_MAX_TIMEOUT_S = 24 * 3600.0
# Monitoring routes: they need no key and must answer while the gateway is full.
_OPEN_PATHS = {"/health", "/ping", "/ready", "/readyz"}
_METRICS_PATH = "/metrics"
# The page that asks for the key, so it needs none.
_PAGE_PATH = "/"
# A GET that generates: the rest of a stream, by its request's path or by its response's.
_STREAMS_PREFIX, _RESPONSES_PREFIX = "/v1/streams/", "/v1/responses/"
# seconds; for reporting a timeout; the connection of a client that does not read the report is cut
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
            if self._admission.allowed_hosts is not None:
                check_host(headers.get("host", ""), self._admission.allowed_hosts)
            key = self._identify(scope["path"], headers)
            timeout_s = _timeout_s(headers.get(TIMEOUT_HEADER))
            quotas, owner, peer = self._admission.quotas, "" if key is None else key.name, peer_of_scope(scope)
            is_work = _is_work(scope)
            account = quotas.check(key, peer) if is_work else None
            with ExitStack() as place, closing(Held(self._admission.bodies, owner)) as held:
                put_caller(scope, Caller(owner, account, held, peer))

                def count() -> None:
                    if is_work:
                        place.enter_context(quotas.admit(key, peer))

                waits = _has_body(headers)
                if not waits:
                    count()
                timed = _TimedBody(receive, self._admission.body_timeout_s, count if waits else _nothing)
                await self._within(timeout_s, self._app(scope, timed, watched), watched, scope["path"])
        except OutriderError as refusal:  # the application answers its own errors
            await error_response(refusal, scope["path"])(scope, receive, watched)

    def _identify(self, path: str, headers: Headers) -> ApiKey | None:
        if path in _OPEN_PATHS or path == _PAGE_PATH or path.startswith(PLAYGROUND_PREFIX):
            return None
        if path == _METRICS_PATH and not self._admission.protect_metrics:
            return None
        authorization, key = headers.get("authorization"), headers.get(_KEY_HEADER)
        if authorization is None and key is not None and is_messages_path(path):
            authorization = f"Bearer {key}"
        return self._admission.identify(authorization)

    async def _within(self, timeout_s: float | None, work: Awaitable[None], watched: _WatchedSend, path: str) -> None:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await work
        except TimeoutError:
            if not limit.expired():
                raise
            late = DeadlineExceeded(f"the request took longer than the {timeout_s:g} s of {TIMEOUT_HEADER}")
            if not watched.has_begun:
                raise late from None
            await watched.last_words(error_event(late, path))


class ReaderGone(OSError):
    """Raised by `send` after the connection was cut; the response treats it as a disconnected client."""


class _WatchedSend:
    """An ASGI `send` that cuts the connection of a client that reads nothing for too long."""

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
            log.warning("a client has not read its answer for %g s and is disconnected", self._timeout_s)
            await self._cut()
        if message["type"] == "http.response.start":
            self.has_begun = True
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_event_stream = content_type.startswith(b"text/event-stream")
        elif not message.get("more_body", False):
            self._is_complete = True

    async def last_words(self, event: bytes) -> None:
        """Ends a begun answer: a stream with an event, anything else by cutting the connection."""
        if self._is_complete:
            return
        if not self._is_event_stream:
            await self._cut()
        self._timeout_s = _LAST_WORDS_S
        await self({"type": "http.response.body", "body": event, "more_body": False})

    async def _cut(self) -> None:
        if self._abort is not None:
            self._abort()
            await asyncio.sleep(0)  # lets the server notice the lost connection
        raise ReaderGone


class _TimedBody:
    """An ASGI `receive` with a timeout for the body; after the body it waits without limit."""

    def __init__(self, receive: Receive, timeout_s: float, on_complete: Callable[[], None]) -> None:
        """on_complete: called when the body is there; what it raises is raised to the reader."""
        self._receive = receive
        self._on_complete = on_complete
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
        if message["type"] != "http.request":
            self._is_complete = True
        elif not message.get("more_body", False):
            self._is_complete = True
            self._on_complete()
        return message


def check_host(header: str, allowed: Container[str]) -> None:
    """Checks a Host header, a name or an address with or without a port, of a server on loopback without API keys.

    A page in a browser on this machine can have its own name resolve to 127.0.0.1 (DNS rebinding) and then read answers
    as its own site's. Its requests still carry that name. Addresses and names without a dot cannot be such a page's.
    Raises InvalidRequest.
    """
    name = header.strip().lower()
    if not name.endswith("]"):
        host, colon, port = name.rpartition(":")
        name = host if colon and port.isdigit() else name
    name = name.rstrip(".")
    with suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return
    if "." not in name or name.endswith(".localhost") or name in allowed:
        return
    raise InvalidRequest(
        f"Host {header[:200]!r} is not this server's; where a proxy sends it, name it in --allowed-hosts", param="host"
    )


def _nothing() -> None:
    pass


def _has_body(headers: Headers) -> bool:
    """Returns whether a body is still to come that will be read: not with an event's id, which says it all."""
    return (
        headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    ) and LAST_EVENT_ID not in headers


def _is_work(scope: Scope) -> bool:
    """Returns whether the request counts against the limits: it has a body to parse, or it generates."""
    path: str = scope["path"]
    if path.startswith(_RESPONSES_PREFIX) and path.endswith("/cancel"):
        return False  # it ends work, also of a caller who holds all of its places
    streams = path.startswith(_RESPONSES_PREFIX) and b"stream=" in scope["query_string"]
    return path not in _OPEN_PATHS and (scope["method"] == "POST" or path.startswith(_STREAMS_PREFIX) or streams)


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
