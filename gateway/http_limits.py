"""The edge of the REST door: reading a body within its limit, JSON without surprises, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gateway.response_types import ErrorAnswer
from shared.errors import (
    InternalError,
    InvalidRequest,
    OutriderError,
    PayloadTooLarge,
    RequestTooSlow,
    Unauthenticated,
)

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
# Escapes of surrogates: a pair is one character, half a pair is no text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# How much of an oversized body is read, and thrown away, before it is refused.
_LINGER_FACTOR = 8
_LINGER_S = 5.0
# nginx's number for a client that hung up; nobody reads it.
_CLIENT_GONE = 499


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Never holds more than the limit. Raises PayloadTooLarge, or InvalidRequest on another content type."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = content_type[:80] or "none"
        raise InvalidRequest(f"Content-Type must be application/json, got {shown}")
    body = bytearray()
    chunks = request.stream()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            body.clear()
            await _discard(chunks, _LINGER_FACTOR * max_bytes)
            raise PayloadTooLarge(f"the body is over the limit of {max_bytes} bytes")
    return bytes(body)


async def _discard(chunks: AsyncGenerator[bytes, None], most_bytes: int) -> None:
    """Reads on for a while: a client that is still sending when the connection closes never sees the answer."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > most_bytes:
                    return


def parse_json(body: bytes) -> object:
    """Strict JSON in UTF-8. Raises InvalidRequest that says what is wrong where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is wrong") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise InvalidRequest("the body has a number with too many digits") from None
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body has {name}, which is not JSON")


def _refuse_lone_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("the body has half a surrogate pair, which is not text") from None


def as_outrider_error(error: Exception) -> OutriderError:
    """An error of ours as it is; any other is logged under a reference that the caller is given."""
    if isinstance(error, OutriderError) and not isinstance(error, InternalError):
        return error
    reference = uuid.uuid4().hex[:12]
    log.error("internal error, reference %s", reference, exc_info=error)
    return InternalError(f"internal error; the server's log has it under reference {reference}")


def error_body(error: OutriderError) -> ErrorAnswer:
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.http_status,
        }
    }


def error_response(error: OutriderError) -> JSONResponse:
    headers = {}
    if isinstance(error, PayloadTooLarge | RequestTooSlow):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


def error_event(error: OutriderError) -> bytes:
    """The error as a server-sent event, for a stream that has begun."""
    return f"data: {json.dumps(error_body(error), ensure_ascii=False)}\n\n".encode()


def status_error_response(status: int, message: str, headers: Any = None) -> JSONResponse:
    """For errors of routing, which are no OutriderErrors: 404, 405."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    body: ErrorAnswer = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with every exception turned into an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            return error_response(as_outrider_error(error))

    return answer
