"""A gRPC server's calls whose request has not arrived yet: how long they may take, and how many there may be.

A call costs its server memory and one of its places from its headers on, and it may be opened without sending anything
else. So each call's first message is read here, within a time, before its method runs. Where too many calls wait, the
one that has waited longest is ended, of the peer that has most of them: whoever sends requests whole is not refused
because of those who do not.

Calls of gRPC's own services (health, reflection) may be watched for ever and need no key: they count as long as they
are open.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.shared.errors import InvalidRequest, OutriderError, Overloaded, RequestTooSlow

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
T = TypeVar("T")

_GRPCS_OWN = "/grpc."


def first_to_go(waiting: Iterable[tuple[str, float, T]]) -> T | None:
    """Returns the oldest of the peer that has most of them. waiting: each one's peer, since when, and what waits."""
    by_peer: dict[str, list[tuple[float, T]]] = defaultdict(list)
    for peer, since, entry in waiting:
        by_peer[peer].append((since, entry))
    if not by_peer:
        return None
    return min(max(by_peer.values(), key=len), key=lambda pair: pair[0])[1]


@dataclass(eq=False)
class _Waiting:
    """One call. since: loop time. is_dropped: it gave its place to another."""

    peer: str
    since: float
    task: asyncio.Task[Any]
    is_dropped: bool = False


class FirstMessages(grpc.aio.ServerInterceptor):
    """The outermost interceptor. It also answers a message that is not valid protobuf with INVALID_ARGUMENT; gRPC alone
    reports UNKNOWN, as for our bugs.
    """

    def __init__(
        self, abort: Callable[[Any, BaseException], Awaitable[Any]], *, max_waiting: int, timeout_s: float
    ) -> None:
        """abort: ends a call with an error's status."""
        self._abort = abort
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: set[_Waiting] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:  # none reads its request that has no deserializer
            return handler
        return self._reading(handler, counts_to_its_end=handler_call_details.method.startswith(_GRPCS_OWN))

    def _reading(self, handler: Handler, *, counts_to_its_end: bool) -> Handler:
        async def serve(requests: AsyncIterator[Any], context: Any) -> None:
            waiting = self._enter(context)
            try:
                first = await self._first(requests)
                if not counts_to_its_end:
                    self._waiting.discard(waiting)
                await _answer(handler, first, requests, context)
            except grpc.aio.AbortError:  # the method has already sent its status
                raise
            except (OutriderError, DecodeError) as error:
                await self._abort(context, error)
            except asyncio.CancelledError:
                if not waiting.is_dropped:
                    raise
                waiting.task.uncancel()
                await self._abort(context, Overloaded("too many calls wait for their request; try again later"))
            finally:
                self._waiting.discard(waiting)

        # On the wire a stream of one message equals one message, but as a stream it is read only on request.
        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _enter(self, context: Any) -> _Waiting:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("gRPC runs methods in tasks")
        if len(self._waiting) >= self._max_waiting:
            last = first_to_go((entry.peer, entry.since, entry) for entry in self._waiting)
            if last is not None:
                last.is_dropped = True
                self._waiting.discard(last)
                last.task.cancel()
        peer, _, _port = context.peer().rpartition(":")
        waiting = _Waiting(peer, asyncio.get_running_loop().time(), task)
        self._waiting.add(waiting)
        return waiting

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise RequestTooSlow(f"the request did not arrive within {self._timeout_s:g} s") from None
        if first is None:
            raise InvalidRequest("the call ended before it sent a request")
        return first


async def _answer(handler: Handler, first: Any, requests: AsyncIterator[Any], context: Any) -> None:
    """Runs the handler's method, of any of the four kinds, and writes what it returns or yields."""
    argument = _Behind(first, requests) if handler.request_streaming else first
    if not handler.response_streaming:
        unary: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary
        await context.write(await unary(argument, context))
        return
    stream: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
    if not inspect.isasyncgenfunction(stream):
        await stream(argument, context)  # it writes its replies itself
        return
    async with aclosing(stream(argument, context)) as replies:
        async for reply in replies:
            await context.write(reply)


class _Behind:
    """A stream of requests whose first one has been read."""

    def __init__(self, first: Any, rest: AsyncIterator[Any]) -> None:
        self._first = first
        self._rest = aiter(rest)

    def __aiter__(self) -> _Behind:
        return self

    def __anext__(self) -> Awaitable[Any]:
        if self._first is None:
            return self._rest.__anext__()
        first, self._first = self._first, None
        return _at_once(first)


async def _at_once(value: Any) -> Any:
    return value
