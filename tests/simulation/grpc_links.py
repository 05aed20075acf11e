"""gRPC over simulated links: the channels and servers that the product's generated stubs and servicers are given.

Messages are serialised; statuses, cancellation and lost connections are what grpc.aio makes of them (shared/rpc.py has
the keepalives). Not here: HTTP/2's flow control, since all messages are small.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from tests.simulation.links import Later, Link, Network
from tests.simulation.loop import Process
from tests.simulation.older_wire import clipped

_Status = tuple[grpc.StatusCode, str]
_GONE: _Status = (grpc.StatusCode.UNAVAILABLE, "the connection is lost")


class Abort(Exception):
    """Raised by a server's context to end its call."""


class SimServer:
    """A gRPC server of one process, to which generated code adds its methods."""

    def __init__(self, net: Network, process: Process, address: str) -> None:
        self.net, self.process = net, process
        self.methods: dict[str, Any] = {}
        net.servers[address] = self

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered ones are used."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def begin(self, link: Link, call: ClientCall, path: str) -> ServerCall:
        return ServerCall(self, link, call, self.methods[path])


class ServerCall:
    """One call at its server; also the servicer's context."""

    def __init__(self, server: SimServer, link: Link, call: ClientCall, handler: Any) -> None:
        self._server, self._link, self._call, self._handler = server, link, call, handler
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._status: _Status = (grpc.StatusCode.OK, "")
        self._is_over = False
        link.server.lost.append(self.cancel)
        self._task = server.process.spawn(self._serve())

    def receive(self, data: bytes) -> None:
        self._inbox.put_nowait(self._handler.request_deserializer(data))

    def cancel(self) -> None:
        """The client is gone."""
        if not self._is_over:
            self._is_over = True
            self._inbox.put_nowait(None)
            self._task.cancel()

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self._inbox.get()) is not None:
            yield request

    async def _serve(self) -> None:
        try:
            if self._handler.request_streaming:
                async for reply in self._handler.stream_stream(self._requests(), self):
                    self._reply(reply)
            else:
                self._reply(await self._handler.unary_unary(await self._inbox.get(), self), is_last=True)
        except Abort:
            pass
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._server.process.problems.append(f"an RPC failed: {error!r}")
            self._status = (grpc.StatusCode.UNKNOWN, repr(error))
        if not self._is_over:
            self._end()
            status = self._status
            what = f"{self._call.num} status {status[0].name}"
            self._link.send(what, lambda: self._call.end(status), by_client=False)

    def _end(self) -> None:
        self._is_over = True
        if self.cancel in self._link.server.lost:
            self._link.server.lost.remove(self.cancel)

    def _reply(self, reply: Any, *, is_last: bool = False) -> None:
        """is_last: the status comes with it."""
        data = _encoded(self._link, reply, self._handler.response_serializer)

        def deliver() -> None:
            self._call.receive(data)
            if is_last:
                self._call.end((grpc.StatusCode.OK, ""))

        if is_last:
            self._end()
        self._link.send(Later("{} {}".format, self._call.num, Later(shown, reply)), deliver, by_client=False)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: object = ()) -> None:
        self._status = (code, details)
        raise Abort(details)

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


class ClientCall:
    """One call at its client; has what the product uses of grpc.aio's calls."""

    _numbers = itertools.count()

    def __init__(self, channel: SimChannel, path: str, serialize: Any, deserialize: Any, request: Any = None) -> None:
        """request: of a unary call; its one message begins it."""
        self.num = f"call-{channel.next_call()}"
        self._serialize, self._deserialize = serialize, deserialize
        self._status: _Status | None = None
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._callbacks: list[Callable[[Any], None]] = []
        self._server_call: ServerCall | None = None
        self._link = link = channel.link()
        if link is None:
            channel.net.loop.call_later(channel.net.latency_s(), self.end, _GONE)
            return
        link.client.lost.append(self._lost)
        server = channel.server
        data = None if request is None else _encoded(link, request, serialize)

        def begin() -> None:
            self._server_call = call = server.begin(link, self, path)
            if data is not None:
                call.receive(data)

        link.send(f"{self.num} {path.rpartition('/')[2]}", begin, by_client=True)

    def receive(self, data: bytes) -> None:
        self._inbox.put_nowait(data)

    def end(self, status: _Status) -> None:
        if self._status is None:
            self._status = status
            self._inbox.put_nowait(None)
            if self._link is not None and self._lost in self._link.client.lost:
                self._link.client.lost.remove(self._lost)
            for callback in self._callbacks:
                callback(self)

    def _lost(self) -> None:
        self.end(_GONE)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)
        if self._status is not None:
            callback(self)

    async def code(self) -> grpc.StatusCode | None:
        return self._status[0] if self._status is not None else None

    async def details(self) -> str | None:
        return self._status[1] if self._status is not None else None

    def cancel(self) -> None:
        if self._status is None:
            self.end((grpc.StatusCode.CANCELLED, "cancelled here"))
            if self._link is not None:
                self._link.send(f"{self.num} cancel", self._cancel_server, by_client=True)

    def _cancel_server(self) -> None:
        if self._server_call is not None:
            self._server_call.cancel()

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise self._error() if self._status[0] is not grpc.StatusCode.OK else asyncio.InvalidStateError("ended")
        data = _encoded(self._link, message, self._serialize)
        if self._link is not None:
            what = Later("{} {}".format, self.num, Later(shown, message))
            self._link.send(what, lambda: self._pass_on(data), by_client=True)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _pass_on(self, data: bytes) -> None:
        if self._server_call is not None:
            self._server_call.receive(data)

    async def read(self) -> Any:
        try:
            data = await self._inbox.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if data is not None:
            return self._deserialize(data)
        self._inbox.put_nowait(None)
        if self._status is not None and self._status[0] is not grpc.StatusCode.OK:
            raise self._error()
        return grpc.aio.EOF

    def _error(self) -> grpc.aio.AioRpcError:
        code, details = self._status or _GONE
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class SimChannel:
    """grpc.aio.Channel to one address; connects again at the next call after its connection was lost."""

    def __init__(self, net: Network, process: Process, address: str) -> None:
        self.net, self.process, self.address = net, process, address
        self._link: Link | None = None
        self._num_calls = itertools.count()

    @property
    def server(self) -> SimServer:
        server = self.net.servers[self.address]
        assert isinstance(server, SimServer)
        return server

    def next_call(self) -> int:
        return next(self._num_calls)

    def link(self) -> Link | None:
        """None: nobody listens there."""
        if self._link is None or not self._link.client.is_open:
            found = self.net.servers.get(self.address)
            if found is None or self.server.process.is_dead:
                return None
            self._link = self.net.connect(self.process, self.server.process, "grpc")
        return self._link

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = True
    ) -> Callable[..., ClientCall]:
        return lambda metadata=None: ClientCall(self, path, request_serializer, response_deserializer)

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = True
    ) -> Callable[..., Any]:
        async def call(request: Any, timeout: float | None = None, metadata: object = None) -> Any:
            stream = ClientCall(self, path, request_serializer, response_deserializer, request)
            try:
                async with asyncio.timeout(timeout):
                    return await stream.read()
            except TimeoutError:
                stream.cancel()
                late = grpc.StatusCode.DEADLINE_EXCEEDED
                raise grpc.aio.AioRpcError(late, grpc.aio.Metadata(), grpc.aio.Metadata(), "too late") from None

        return call

    def unary_stream(self, path: str, *args: Any, **more: Any) -> None:
        """Nothing that is simulated uses one (the health service's Watch)."""

    async def close(self) -> None:
        if self._link is not None:
            self._link.close(by_client=True)


def _encoded(link: Link | None, message: Any, serialize: Any) -> bytes:
    """Returns the message as both ends of the link know it."""
    data: bytes = serialize(message)
    if link is None or not (link.client.process.is_older or link.server.process.is_older):
        return data
    known = clipped(message.DESCRIPTOR.full_name, data)
    link.net.num_clipped += len(known) < len(data)
    return known


def shown(message: Any) -> str:
    """A message in a trace: what it is, and the positions in it."""
    inner = message
    for group in ("request", "reply"):
        if message.DESCRIPTOR.oneofs_by_name.get(group) is not None and message.WhichOneof(group):
            inner = getattr(message, message.WhichOneof(group))
    fields = inner.DESCRIPTOR.fields_by_name
    parts = [inner.DESCRIPTOR.name]
    parts += [f"{name}={getattr(inner, name)}" for name in ("epoch", "base_len") if name in fields]
    parts += [f"{name}={list(getattr(inner, name))}" for name in ("token_ids", "committed_token_ids") if name in fields]
    if "finish_reason" in fields and inner.finish_reason:
        parts.append(f"finish={inner.finish_reason}")
    return " ".join(parts)
