"""The HTTP server's connections: how many, and how long a client may take to send its request.

With httptools, uvicorn limits neither headers nor body nor connections, so this protocol adds timeouts for a request's
headers and body, and a connection count. Where there are too many, a new one takes the place of the one that has waited
longest for its request, of the address that has most of these. Not covered: a stalled TLS handshake, which asyncio ends
after 60 s, counts only once it is complete.

Not here: limits that depend on the request (limits.py, admission.py). The entry point is `protocol_factory`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.gateway.admission.auth import peer_of_scope
from outrider.shared.errors import RETRY_S
from outrider.shared.rpc import first_to_go

# ASGI scope key: a function that drops the connection without sending what is queued.
ABORT = "outrider.abort"
# seconds; after its timeout read_body (limits.py) answers and discards the body, this ends the connection
_BODY_GRACE_S = 10.0
_TOO_MANY = "too many connections; try again later"


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one server. A request's head is its request line and headers."""

    max_connections: int = 1024
    max_head_bytes: int = 64 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0


def protocol_factory(limits: HttpLimits) -> Callable[..., asyncio.Protocol]:
    """Returns the value for uvicorn.Config's `http`."""
    return partial(LimitedHttpProtocol, limits)


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, limits: HttpLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._clock: asyncio.TimerHandle | None = None
        self._in_head = True
        self._num_head_bytes = 0
        self._num_heads = 0
        self._refused = False
        self._waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        if len(self.connections) > self._limits.max_connections and not self._takes_a_place():
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, _TOO_MANY)
        else:
            self._start_clock(self._limits.header_timeout_s, self._head_is_late)

    def _takes_a_place(self) -> bool:
        """Ends another connection, without a whole request; returns whether there is one."""
        others = [other for other in self.connections if isinstance(other, LimitedHttpProtocol) and other is not self]
        last = first_to_go((other.peer, other._waiting_since, other) for other in others if other.waits)
        if last is not None:
            last._refuse(HTTPStatus.SERVICE_UNAVAILABLE, _TOO_MANY)
        return last is not None

    @property
    def peer(self) -> str:
        return peer_of_scope({"client": self.client})

    @property
    def waits(self) -> bool:
        """True while the client has to send: it has no request, or half of one."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not self._refused and (not self._in_head or not is_answering)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head and self._clock is None:  # the next request on a keep-alive connection
            self._start_clock(self._limits.header_timeout_s, self._head_is_late)
        was_in_head, num_heads = self._in_head, self._num_heads
        super().data_received(data)
        if was_in_head and self._in_head and self._num_heads == num_heads and not self._refused:
            # The parser does not report the bytes of an unfinished header. Where a whole request came at once, most
            # are its body's.
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
        self._num_heads += 1
        self._num_head_bytes = 0
        self._start_clock(self._limits.body_timeout_s + _BODY_GRACE_S, self._body_is_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

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
            # Bytes of the next request came while this one is being answered; its timeout starts on its turn.
            self._start_clock(self._limits.header_timeout_s, self._head_is_late)
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no request within {self._limits.header_timeout_s:g} s")

    def _body_is_late(self) -> None:
        if self.flow.read_paused:  # we paused reading: it is not the client's delay
            self._start_clock(self._limits.body_timeout_s, self._body_is_late)
        else:
            self.transport.abort()

    def _refuse_head(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"request line and headers exceed {self._limits.max_head_bytes} bytes or {self._limits.max_headers} "
            "headers",
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers without the application, in OpenAI's error format, and closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_clock()
        is_full = status is HTTPStatus.SERVICE_UNAVAILABLE
        kind = "service_unavailable_error" if is_full else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": status.value}
        body = json.dumps({"error": error}).encode()
        retry = f"retry-after: {math.ceil(RETRY_S)}\r\n" if is_full else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n{retry}\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
