"""Admission on the gRPC server, an interceptor: API keys, quotas, clients that do not read.

It handles the streams of outrider.v1.Gateway itself: a call without a valid key is refused unread, any other counts
from its request on (`rpc.FirstMessages` waits for it); replies are written one by one, so that an unread one is
noticed. Deadlines need nothing here: gRPC cancels the method, which releases what it holds.

Health checks and reflection pass unchecked; they reveal nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from outrider.gateway.admission.auth import Admission, Caller, CallerContext
from outrider.gateway.admission.body_budget import Held
from outrider.shared import rpc
from outrider.shared.api_keys import ApiKey
from outrider.shared.errors import OutriderError, ReaderTooSlow

log = logging.getLogger(__name__)

_GUARDED = "/outrider.v1.Gateway/"
# seconds; to send the status, which a client that does not read never takes
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
        method: Any = handler.unary_stream  # typed for sync servers; ours is an async generator

        async def serve(request: Any, context: Any) -> None:
            peer = rpc.peer_of_context(context)
            try:
                with self._admission.quotas.admit(key, peer) as account:
                    owner = "" if key is None else key.name
                    caller = Caller(owner, account, Held(self._admission.bodies, owner), peer)
                    async with aclosing(method(request, CallerContext(context, caller))) as replies:
                        async for reply in replies:
                            await self._write(context, reply)
            except grpc.aio.AbortError:  # the method has already sent its status
                raise
            except Exception as error:
                await _abort_within(context, error)

        return grpc.unary_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _write(self, context: Any, reply: Any) -> None:
        timeout_s = self._admission.slow_reader_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await context.write(reply)
        except TimeoutError:
            if not limit.expired():
                raise
            log.warning("a client has not read its stream for %g s and is disconnected", timeout_s)
            raise ReaderTooSlow(f"the stream was not read for {timeout_s:g} s") from None


async def _abort_within(context: Any, error: Exception) -> None:
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await rpc.abort(context, error)
    except TimeoutError:
        # The status is queued behind unread replies. This ends the method; gRPC keeps the rest for the client.
        raise asyncio.CancelledError from None


def _refusing(refusal: OutriderError) -> Handler:
    """Returns a handler that refuses without reading the request."""

    async def refuse(requests: AsyncIterator[Any], context: Any) -> None:
        await rpc.abort(context, refusal)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for name, value in details.invocation_metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None
