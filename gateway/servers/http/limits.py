"""The HTTP server's parsing: bodies within their limit, strict JSON, errors in OpenAI's format, or in
Anthropic's on its routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.admission.body_budget import Held
from outrider.gateway.anthropic.errors import MessagesErrorAnswer, is_messages_path, messages_error
from outrider.gateway.openai.answer_types import ErrorAnswer
from outrider.shared.errors import (
    InternalError,
    InvalidRequest,
    OutriderError,
    PayloadTooLarge,
    RequestTooSlow,
    Unauthenticated,
)
from outrider.shared.strict_json import strict_json

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
# factor of the body limit; how much of an oversized body is read and discarded before the refusal
_LINGER_FACTOR = 8
_LINGER_S = 5.0
# nginx's status for a disconnected client; nobody receives it.
_CLIENT_GONE = 499


async def read_body(request: Request, max_bytes: int, held: Held) -> bytes:
    """Never holds more than the limit. Raises PayloadTooLarge, InvalidRequest for another content type, or what
    Held.add_body raises.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = content_type[:80] or "none"
        raise InvalidRequest(f"Content-Type must be application/json, got {shown}")
    body = bytearray()
    chunks = request.stream()
    async for chunk in chunks:
        body += chunk
        held.add_body(len(chunk))
        if len(body) > max_bytes:
            body.clear()
            held.close()
            await _discard(chunks, _LINGER_FACTOR * max_bytes)
            raise PayloadTooLarge(f"the body exceeds the limit of {max_bytes} bytes")
    return bytes(body)


async def _discard(chunks: AsyncGenerator[bytes, None], most_bytes: int) -> None:
    """Reads on for a while: a client still sending when the connection closes would never see the answer."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > most_bytes:
                    return


def parse_json(body: bytes) -> object:
    """Parses strict UTF-8 JSON. Raises InvalidRequest that says what is wrong where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: invalid byte at offset {error.start}") from None
    return strict_json(text, "the body")


def as_outrider_error(error: Exception) -> OutriderError:
    """Returns an OutriderError unchanged; any other error is logged, and the caller gets the log's reference."""
    if isinstance(error, OutriderError) and not isinstance(error, InternalError):
        return error
    reference = uuid.uuid4().hex[:12]
    log.error("internal error, reference %s", reference, exc_info=error)
    return InternalError(f"internal error; see the server's log, reference {reference}")


def error_body(error: OutriderError) -> ErrorAnswer:
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.http_status,
        }
    }


def error_response(error: OutriderError, path: str) -> JSONResponse:
    """Returns an error's response. path: the request's; its route decides the form."""
    headers = {}
    if isinstance(error, PayloadTooLarge | RequestTooSlow):
        headers["connection"] = "close"  # the rest of the body stays unread
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(_body_on(path, error), status_code=error.http_status, headers=headers)


def _body_on(path: str, error: OutriderError) -> ErrorAnswer | MessagesErrorAnswer:
    return messages_error(error.http_status, error.message) if is_messages_path(path) else error_body(error)


def error_event(error: OutriderError, path: str) -> bytes:
    """Returns the error as a server-sent event, for a stream that has begun."""
    name = "event: error\n" if is_messages_path(path) else ""
    return f"{name}data: {json.dumps(_body_on(path, error), ensure_ascii=False)}\n\n".encode()


def status_error_response(status: int, message: str, path: str, headers: Any = None) -> JSONResponse:
    """Returns the answer to a routing error (404, 405), which is not an OutriderError."""
    if is_messages_path(path):
        return JSONResponse(messages_error(status, message), status_code=status, headers=headers)
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    body: ErrorAnswer = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def guarded(endpoint: Endpoint) -> Endpoint:
    """Wraps the endpoint so that every exception becomes an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            return error_response(as_outrider_error(error), request.url.path)

    return answer
