"""The gRPC door's guard, an interceptor: keys, quotas, slow requests, readers that do not read.

It answers for the streams of outrider.v1.Gateway itself: the request's message is read only when the call has a place,
and replies are written one by one, so that it sees which one is not taken. A client's deadline needs nothing here: gRPC
cancels the method, which frees what it holds.

Health checks and reflection pass untouched; they say nothing about anybody's requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from gateway.admission import Admission
from gateway.auth import Caller, CallerContext
from shared import rpc
from shared.api_keys import ApiKey
from shared.errors import InvalidRequest, OutriderError, ReaderTooSlow, RequestTooSlow

log = logging.getLogger(__name__)

_GUARDED = "/outrider.v1.Gateway/"
# To get the status out; a client that reads nothing takes no status either.
_LAST_WORDS_S = 1.0

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class GrpcAdmission(grpc.aio.ServerInterceptor):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_GUARDED):
            return handler
        try:
            key = self._admission.identify(_authorization(handler_call_details))
        except OutriderError as refusal:
            return _refusing(refusal)
        return self._guarded(handler, key) if handler.response_streaming else handler

    def _guarded(self, handler: Handler, key: ApiKey | None) -> Handler:
        method: Any = handler.unary_stream  # typed for threads; ours is an async generator

        async def serve(requests: AsyncIterator[Any], context: Any) -> None:
            try:
                with self._admission.quotas.admit(key) as account:
                    request = await self._message(requests)
                    caller = Caller("" if key is None else key.name, account)
                    async with aclosing(method(request, CallerContext(context, caller))) as replies:
                        async for reply in replies:
                            await self._write(context, reply)
            except grpc.aio.AbortError:  # the method has said already how it ended
                raise
            except Exception as error:
                await _abort_within(context, error)

        # On the wire a stream of one message is one message; as a stream it is read when it is asked for.
        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _message(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._admission.body_timeout_s):
                request = await anext(aiter(requests), None)
        except TimeoutError:
            raise RequestTooSlow(f"the request did not arrive within {self._admission.body_timeout_s:g} s") from None
        if request is None:
            raise InvalidRequest("the call ended before its request came")
        return request

    async def _write(self, context: Any, reply: Any) -> None:
        timeout_s = self._admission.slow_reader_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await context.write(reply)
        except TimeoutError:
            if not limit.expired():
                raise
            log.warning("a client has not read its stream for %g s and is cut off", timeout_s)
            raise ReaderTooSlow(f"nothing was read for {timeout_s:g} s") from None


async def _abort_within(context: Any, error: Exception) -> None:
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await rpc.abort(context, error)
    except TimeoutError:
        # The status waits behind replies that nobody reads. This ends the method; gRPC keeps the rest for the client.
        raise asyncio.CancelledError from None


def _refusing(refusal: OutriderError) -> Handler:
    """Answers without reading the request."""

    async def refuse(requests: AsyncIterator[Any], context: Any) -> None:
        await rpc.abort(context, refusal)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for name, value in details.invocation_metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None
