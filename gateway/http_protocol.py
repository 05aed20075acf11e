"""The REST door's connections: how many, and how long a client may take to say what it wants.

uvicorn bounds none of it with httptools: headers of any size for any time, connections without end, a body that never
ends. So its protocol gets a clock for the head of a request and one for its body, and it counts. What is left: a TLS
handshake that stalls is ended by asyncio after 60 s and is counted only when it is done.

Not here: limits that need the request (http_limits.py, http_admission.py). `protocol_factory` is all there is to call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# On the ASGI scope: drops the connection without waiting for what is still to be sent.
ABORT = "outrider.abort"
# read_body (http_limits.py) answers a slow body itself and reads on for a while; this much later nobody does any more.
_BODY_GRACE_S = 10.0


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of one door; the head of a request is its request line and its headers."""

    max_connections: int = 1024
    max_head_bytes: int = 64 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0


def protocol_factory(limits: HttpLimits) -> Callable[..., asyncio.Protocol]:
    """What uvicorn.Config takes as `http`."""
    return partial(LimitedHttpProtocol, limits)


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, limits: HttpLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._clock: asyncio.TimerHandle | None = None
        self._in_head = True
        self._num_head_bytes = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; try again later")
        else:
            self._start_clock(self._limits.header_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head and self._clock is None:  # the next request of a connection that is kept
            self._start_clock(self._limits.header_timeout_s, self._head_is_late)
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self._refused:
            # What the parser holds back of an unfinished header is seen nowhere else.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._limits.max_head_bytes or len(self.headers) > self._limits.max_headers:
            self._refuse_head()
        if self._refused:
            return
        self._in_head = False
        self._num_head_bytes = 0
        self._start_clock(self._limits.body_timeout_s + _BODY_GRACE_S, self._body_is_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._in_head = True
            self._stop_clock()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _start_clock(self, seconds: float, late: Callable[[], None]) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # Bytes of a next request came while this one is being answered; its time begins when it is its turn.
            self._start_clock(self._limits.header_timeout_s, self._head_is_late)
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no request within {self._limits.header_timeout_s:g} s")

    def _body_is_late(self) -> None:
        if self.flow.read_paused:  # our own doing: what the client has sent is not read yet
            self._start_clock(self._limits.body_timeout_s, self._body_is_late)
        else:
            self.transport.abort()

    def _refuse_head(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"request line and headers are over {self._limits.max_head_bytes} bytes or {self._limits.max_headers} "
            "headers",
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers without the application, in OpenAI's shape, and closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_clock()
        is_full = status is HTTPStatus.SERVICE_UNAVAILABLE
        kind = "service_unavailable_error" if is_full else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": status.value}
        body = json.dumps({"error": error}).encode()
        retry = "retry-after: 1\r\n" if is_full else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n{retry}\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
