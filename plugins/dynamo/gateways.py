"""Outrider's gateways over HTTP: a stream of events that outlives any one of them.

When a gateway is lost, the next one is asked for the rest, as any client may. Nothing that a gateway sends is trusted:
a line has a limit, and what is no event ends that request alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.shared.errors import InternalError, InvalidRequest, OutriderError, Unavailable

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "OUTRIDER_API_KEY"
# seconds; to connect, and between two parts of a stream: a long prompt is read meanwhile, and nothing is sent
_CONNECT_S, _SILENT_S = 5.0, 300.0
# seconds; between two tries, doubled from the first to the longest
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# bytes; of a line, or of an answer that is no stream; a line holds the ids of a prompt: a million of seven digits
_MAX_LINE_BYTES = 16 * 2**20
# HTTP status of a gateway that may serve the same request in a moment, or where another one may
_TRY_AGAIN = (502, 503, 504)
_INVALID, _UNKNOWN, _CONFLICT = 400, 404, 409
# times; a stream that was taken over is asked for again. Another prompt under its id leaves it at once; of two workers
# with the same request, the one that came later keeps it
_MOST_RETAKEN = 3


class _Refused(OutriderError):
    """The gateway's own refusal, with its status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.http_status = status


@dataclass
class _Position:
    """How far a stream has come. refusal: of the request as a new one, which one that was begun before may get: as its
    id is known, or its rest would not do as a request.
    """

    last_id: str = ""
    refusal: _Refused | None = None
    num_retaken: int = 0

    def go_on_after(self, error: _Refused) -> None:
        """Raises the error that ends the request, if there is no other way to ask for it."""
        if self.last_id and error.http_status == _CONFLICT and self.num_retaken < _MOST_RETAKEN:
            self.num_retaken += 1
        elif not self.last_id and self.refusal is None and error.http_status in (_CONFLICT, _INVALID):
            self.refusal = error
        else:
            raise self.refusal if self.refusal is not None and error.http_status == _UNKNOWN else error


@dataclass(frozen=True)
class Capacity:
    """Of all verifiers that serve, together."""

    block_size: int
    num_blocks: int
    num_free_blocks: int
    max_sessions: int


class Gateways:
    """One set of gateways before one fleet. patience_s: how long a stream waits while none of them serves it."""

    def __init__(self, addresses: Sequence[str], patience_s: float = 60.0) -> None:
        self._urls = [address if "://" in address else f"http://{address}" for address in addresses]
        self._patience_s = patience_s
        self._turn = itertools.count()
        key = os.environ.get(API_KEY_VARIABLE, "")
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_CONNECT_S, read=_SILENT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def model_card(self) -> dict[str, Any]:
        """Waits until a gateway serves, however long."""
        for url in self._in_turn():
            try:
                return dict((await self._json(url, "/v1/models"))["data"][0])
            except (httpx.HTTPError, Unavailable, LookupError, TypeError, ValueError) as error:
                log.info("waiting for the gateway at %s: %s", url, error or type(error).__name__)
                await asyncio.sleep(_LONGEST_PAUSE_S)
        raise AssertionError("gateways are asked in turn without end")

    async def capacity(self) -> Capacity | None:
        """None while no gateway tells it."""
        try:
            fleet = await self._json(next(self._in_turn()), "/fleet")
            views = [view for view in fleet["verifiers"] if view["healthy"]]
            sums = (
                sum(int(view[name]) for view in views) for name in ("num_blocks", "num_free_blocks", "max_sessions")
            )
            return Capacity(max(int(view["block_size"]) for view in views), *sums)
        except (httpx.HTTPError, OutriderError, LookupError, RecursionError, TypeError, ValueError):
            return None

    async def events(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of an answer: of a new one, or from the beginning of one with this request_id.

        Raises an OutriderError with the gateway's HTTP status; Unavailable when none has served for `patience_s`.
        """
        position, since, pause_s = _Position(), time.monotonic(), _FIRST_PAUSE_S
        for url in self._in_turn():
            try:
                async with aclosing(self._connection(url, body, position)) as events:
                    async for event in events:
                        yield event
                        since, pause_s = time.monotonic(), _FIRST_PAUSE_S
                return
            except (httpx.TransportError, Unavailable) as error:
                if time.monotonic() - since > self._patience_s:
                    raise Unavailable(f"no gateway has served for {self._patience_s:.0f} s: {error}") from error
                log.info("%s: %s; another gateway is asked", url, error or type(error).__name__)
            except _Refused as refusal:
                position.go_on_after(refusal)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _in_turn(self) -> itertools.cycle[str]:
        first = next(self._turn) % len(self._urls)
        return itertools.cycle(self._urls[first:] + self._urls[:first])

    async def _json(self, url: str, path: str) -> Any:
        async with self._client.stream("GET", url + path, timeout=_CONNECT_S) as response:
            body = await _whole(response)
            if response.status_code != 200:
                raise _refusal(response.status_code, body)
            return json.loads(body)

    async def _connection(
        self, url: str, body: Mapping[str, Any], position: _Position
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events behind the position until the end of the answer."""
        async with self._request(url, body, position) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, await _whole(response))
            event_id = position.last_id
            async for line in _lines(response):
                field, _, value = line.partition(b": ")
                if field == b"id":
                    event_id = value.decode(errors="replace")
                elif field == b"data":
                    if value == b"[DONE]":
                        return
                    event = _event(value)
                    position.last_id = event_id
                    yield event
        raise Unavailable("the stream ended before its end mark")

    def _request(
        self, url: str, body: Mapping[str, Any], position: _Position
    ) -> AbstractAsyncContextManager[httpx.Response]:
        if position.last_id or position.refusal is not None:
            headers = {"last-event-id": position.last_id} if position.last_id else {}
            return self._client.stream("GET", f"{url}/v1/streams/cmpl-{body['request_id']}", headers=headers)
        headers = {"content-type": "application/json"}
        return self._client.stream("POST", f"{url}/v1/completions", content=_to_json(body), headers=headers)


def _to_json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request is not JSON: {error}") from None


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(rest) > _MAX_LINE_BYTES:
            raise InternalError("a line of the gateway's stream is too long")


async def _whole(response: httpx.Response) -> bytes:
    data = b""
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > _MAX_LINE_BYTES:
            raise InternalError("the gateway's answer is too long")
    return data


def _event(data: bytes) -> dict[str, Any]:
    event = _parsed(data)
    if event is None:
        raise InternalError("the gateway's stream has something that is no event")
    error = event.get("error")
    if isinstance(error, dict):
        raise _refusal(error.get("code"), data)
    return event


def _refusal(status: object, data: bytes) -> OutriderError:
    """The gateway's error, from its body or event."""
    error = (_parsed(data) or {}).get("error")
    message = str(error.get("message", ""))[:1000] if isinstance(error, dict) else ""
    message = message or f"the gateway answered with status {status}"
    if status in _TRY_AGAIN:
        return Unavailable(message)
    return _Refused(message, status) if isinstance(status, int) and 400 <= status < 600 else InternalError(message)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
