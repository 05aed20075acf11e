"""Code shared by all gRPC servers and channels: options, TLS, health, reflection, errors, draining.

Not here: what the methods do (the servicers) and how messages are parsed (`wire`).
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import logging
import math
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.shared.errors import InternalError, InvalidRequest, OutriderError, Overloaded, RequestTooSlow
from outrider.shared.listening import cannot_listen
from outrider.shared.tls import TlsConfig, channel_credentials, server_credentials

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
T = TypeVar("T")

# of the methods of health checks and reflection
_GRPCS_OWN = "/grpc."
# bytes; one message: fits a prompt of a million tokens with its hidden states
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# bytes; names and values of one call's metadata, as gRPC counts: a key, an id and a deadline take a few hundred
MAX_METADATA_BYTES = 16 * 1024
_IPV6_PREFIX_LEN = 64  # bits
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail loudly
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanishes without a FIN is detected, and its resources freed, within 30 + 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default of 60 s overrides the line above
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for silent connections; the default is 120 s
)
# s; for a call's first message, at a service that sets no other time; a busy one reads what has come within it
_FIRST_MESSAGE_S = 30.0
# calls; whose first message has not come; a gateway opens its sessions at once with their first message, some KB each
_MAX_WAITING = 1024
# A peer that vanishes without a FIN (pulled cable, SIGSTOP) is detected within 10 + 5 s.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # see the server's options
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True)
class ServerOptions:
    """A server's TLS, reflection, limits and interceptors. max_concurrent_rpcs and max_connections None: unlimited;
    one connection gets half of the first. max_waiting: calls without their first message, which has first_message_s to
    arrive.
    """

    tls: TlsConfig | None = None
    reflection: bool = True
    max_receive_bytes: int = MAX_MESSAGE_BYTES
    max_concurrent_rpcs: int | None = None
    max_connections: int | None = None
    max_waiting: int = _MAX_WAITING
    first_message_s: float = _FIRST_MESSAGE_S
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()


def open_channel(address: str, tls: TlsConfig | None = None, server_name: str = "") -> grpc.aio.Channel:
    """A channel with keepalive to `address`, host:port; encrypted with `tls`.

    server_name: the name in the server's certificate, for an already resolved address; default: the host.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    override = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=(*CHANNEL_OPTIONS, *override))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends a call with the error's status; an unexpected error is logged, not shown.

    The trailer `retry-after-ms` has the error's retry time, if it has one. A call that its client has reset is
    cancelled instead, as it can take no status: gRPC would log two stacks for each of thousands a second.
    """
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, OutriderError):
        code = grpc.StatusCode[error.grpc_code]
        detail = f"{error.param}: {error.message}" if error.param else error.message
        if error.retry_after_s is not None:
            trailers = (("retry-after-ms", str(math.ceil(error.retry_after_s * 1000))),)
    elif isinstance(error, DecodeError):
        code, detail = grpc.StatusCode.INVALID_ARGUMENT, f"broken protobuf: {error}"
    else:
        log.error("unexpected error in %s", getattr(context, "code", lambda: "a call")(), exc_info=error)
        code, detail = grpc.StatusCode.INTERNAL, InternalError("internal error, see the server's log").message
    try:
        await context.abort(code, detail, trailers)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def peer_of_context(context: Any) -> str:
    """Returns the peer of a gRPC call, from its context's peer(): `ipv4:HOST:PORT`, `ipv6:[HOST]:PORT` with escaped
    brackets, or another form.
    """
    kind, _, rest = unquote(context.peer()).partition(":")
    return network_of(rest.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else kind


def network_of(host: str) -> str:
    """Returns the name of a client at an address: an IPv6 client has a network of 2^64 addresses (RFC 6177)."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX_LEN), strict=False))


@dataclass
class Server:
    """A gRPC server; reports NOT_SERVING until `serving()`, and again once draining starts."""

    grpc_server: grpc.aio.Server
    health: health.aio.HealthServicer
    port: int

    async def serving(self) -> None:
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace_s: float) -> None:
        """Refuses new sessions, lets running ones finish for `grace_s` seconds, then cuts them."""
        await self.health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)


async def start_server(
    host: str,
    port: int,
    add_services: Callable[[grpc.aio.Server], None],
    service_names: tuple[str, ...],
    options: ServerOptions | None = None,
    *,
    port_setting: str = "port",
) -> Server:
    """Binds and starts. Raises ConfigError for a busy port, naming port_setting, and for a broken TLS file."""
    options = options or ServerOptions()
    arguments = (*_SERVER_OPTIONS, ("grpc.max_receive_message_length", options.max_receive_bytes))
    if options.max_connections is not None:
        arguments = (*arguments, ("grpc.max_allowed_incoming_connections", options.max_connections))
    if options.max_concurrent_rpcs is not None:
        arguments = (*arguments, ("grpc.max_concurrent_streams", max(1, options.max_concurrent_rpcs // 2)))
    reading = FirstMessages(max_waiting=options.max_waiting, timeout_s=options.first_message_s)
    interceptors = (reading, *options.interceptors)
    server = grpc.aio.server(
        options=arguments, interceptors=interceptors, maximum_concurrent_rpcs=options.max_concurrent_rpcs
    )
    add_services(server)
    health_servicer = health.aio.HealthServicer()
    await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if options.reflection:
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound_port = _bind(server, f"{host}:{port}", options.tls)
    except RuntimeError as error:  # gRPC's own
        raise cannot_listen(host, port, port_setting, str(error)) from None
    await server.start()
    return Server(server, health_servicer, bound_port)


def _bind(server: grpc.aio.Server, address: str, tls: TlsConfig | None) -> int:
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(tls))


async def is_serving(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """Makes one health check; False for any failure."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def on_hangup(reload: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `reload` on every SIGHUP, whose default would end the process."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@asynccontextmanager
async def until_signal() -> AsyncIterator[asyncio.Event]:
    """An event set by SIGTERM or SIGINT; the handlers are removed at the end."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        yield stop
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def first_to_go(waiting: Iterable[tuple[str, float, T]]) -> T | None:
    """Returns the oldest of the peer that has most of them. waiting: each one's peer, since when, and what waits."""
    by_peer: dict[str, list[tuple[float, T]]] = defaultdict(list)
    for peer, since, entry in waiting:
        by_peer[peer].append((since, entry))
    if not by_peer:
        return None
    busiest = max(by_peer.values(), key=lambda entries: len(entries))
    return min(busiest, key=lambda pair: pair[0])[1]


@dataclass(eq=False)
class _Waiting:
    """One call. since: loop time. is_dropped: it gave its place to another."""

    peer: str
    since: float
    task: asyncio.Task[Any]
    is_dropped: bool = False


class FirstMessages(grpc.aio.ServerInterceptor):
    """Reads each call's first message, within a time, before its method runs; the outermost interceptor.

    A call costs its server memory and one of its places from its headers on, and can be opened without sending anything
    else. Where too many wait, the one that has waited longest is ended, of the peer that has most of them: who sends
    requests whole is not refused because of those who do not. Calls of gRPC's own services (health, reflection) can be
    watched for ever and need no key: they count as long as they are open.

    A message that is not valid protobuf is answered with INVALID_ARGUMENT; gRPC alone reports UNKNOWN, as for our bugs.
    """

    def __init__(self, *, max_waiting: int, timeout_s: float) -> None:
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
                await abort(context, error)
            except asyncio.CancelledError:
                if not waiting.is_dropped:
                    raise
                waiting.task.uncancel()
                await abort(context, Overloaded("too many calls wait for their request; try again later"))
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
        waiting = _Waiting(peer_of_context(context), asyncio.get_running_loop().time(), task)
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
