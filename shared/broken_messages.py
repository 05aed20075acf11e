"""A request that is not valid protobuf ends with INVALID_ARGUMENT; gRPC alone would report UNKNOWN, as for our bugs.

The outermost interceptor, for calls whose single request gRPC parses before our code runs: unary calls and the health
service's Watch. Request streams are parsed as they are read; there rpc.abort reports the same status.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class BrokenMessages(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        method: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return _reporting(handler, method) if inspect.iscoroutinefunction(method) else handler


def _reporting(handler: Handler, method: Any) -> Handler:
    parse: Any = handler.request_deserializer

    def parse_or_error(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    async def serve(request: Any, context: Any) -> Any:
        if isinstance(request, DecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"broken protobuf: {request}")
        return await method(request, context)

    make: Any = (
        grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    )
    made: Handler = make(serve, request_deserializer=parse_or_error, response_serializer=handler.response_serializer)
    return made
