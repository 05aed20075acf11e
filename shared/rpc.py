"""What every gRPC server and channel here has in common: options, TLS, health, reflection, errors, draining.

Not here: what the methods do (the servicers) and how messages are read (`wire`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.broken_messages import BrokenMessages
from shared.errors import InternalError, OutriderError
from shared.tls import TlsConfig, channel_credentials, server_credentials

log = logging.getLogger(__name__)

# A prompt of a million tokens with its hidden states fits; a stray gigabyte does not.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Names and values of one call's metadata, in gRPC's counting; a key, an id and a deadline take a few hundred.
MAX_METADATA_BYTES = 16 * 1024
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail loudly
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanished without a FIN gives back what it holds after 30 + 10 s at the latest.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the default of 60 s overrules the line above: freed after 89 s, now 39
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),  # a connection that says nothing; the default is 120 s
)
# A peer that vanished without a FIN (a pulled cable, SIGSTOP) is noticed after 10 + 5 s at the latest.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # as above: noticed after 69 s without it
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True)
class Door:
    """How a server's port is guarded. Without a number, RPCs at a time are not bounded here."""

    tls: TlsConfig | None = None
    reflection: bool = True
    max_receive_bytes: int = MAX_MESSAGE_BYTES
    max_concurrent_rpcs: int | None = None
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()


def open_channel(address: str, tls: TlsConfig | None = None, server_name: str = "") -> grpc.aio.Channel:
    """A channel with keepalive to `address`, host:port; encrypted with `tls`.

    server_name: the name in the server's certificate, for an address that was looked up before; default: the host.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    override = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=(*CHANNEL_OPTIONS, *override))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends one call with the status that fits the error; an unexpected error is logged, not shown.

    When the error knows it, the trailer `retry-after-ms` says when to try again.
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
    await context.abort(code, detail, trailers)


@dataclass
class Server:
    """A gRPC server that says NOT_SERVING until `serving()` and again from the first moment of draining."""

    grpc_server: grpc.aio.Server
    health: health.aio.HealthServicer
    port: int

    async def serving(self) -> None:
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace_s: float) -> None:
        """No new sessions, those that run may finish for `grace_s` seconds, then they are cut."""
        await self.health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)


async def start_server(
    host: str,
    port: int,
    add_services: Callable[[grpc.aio.Server], None],
    service_names: tuple[str, ...],
    door: Door | None = None,
) -> Server:
    """Binds and starts. Raises RuntimeError (gRPC's own) when the port is taken, ConfigError for a broken TLS file."""
    door = door or Door()
    options = (*SERVER_OPTIONS, ("grpc.max_receive_message_length", door.max_receive_bytes))
    interceptors = (BrokenMessages(), *door.interceptors)
    server = grpc.aio.server(
        options=options, interceptors=interceptors, maximum_concurrent_rpcs=door.max_concurrent_rpcs
    )
    add_services(server)
    health_servicer = health.aio.HealthServicer()
    await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if door.reflection:
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound_port = _bind(server, f"{host}:{port}", door.tls)
    await server.start()
    return Server(server, health_servicer, bound_port)


def _bind(server: grpc.aio.Server, address: str, tls: TlsConfig | None) -> int:
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(tls))


async def is_serving(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """One health check; False for any failure."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def on_hangup(reload: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `reload` at every SIGHUP, which would end the process otherwise."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@asynccontextmanager
async def until_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets; the handlers are taken back at the end."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        yield stop
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
