"""What every gRPC server and channel here has in common: options, health, reflection, errors, draining.

Not here: what the methods do (the servicers) and how messages are read (`wire`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.errors import InternalError, OutriderError

log = logging.getLogger(__name__)

# A prompt of a million tokens with its hidden states fits; a stray gigabyte does not.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail loudly
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A peer that vanished without a FIN (a pulled cable, SIGSTOP) is noticed after 10 + 5 s at the latest.
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """An insecure channel with keepalive; `address` is host:port."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends one call with the status that fits the error; an unexpected error is logged, not shown."""
    if isinstance(error, OutriderError):
        code = grpc.StatusCode[error.grpc_code]
        detail = f"{error.param}: {error.message}" if error.param else error.message
    elif isinstance(error, DecodeError):
        code, detail = grpc.StatusCode.INVALID_ARGUMENT, f"broken protobuf: {error}"
    else:
        log.error("unexpected error in %s", getattr(context, "code", lambda: "a call")(), exc_info=error)
        code, detail = grpc.StatusCode.INTERNAL, InternalError("internal error, see the server's log").message
    await context.abort(code, detail)


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
    host: str, port: int, add_services: Callable[[grpc.aio.Server], None], service_names: tuple[str, ...]
) -> Server:
    """Binds and starts; raises OutriderError-free RuntimeError from gRPC when the port is taken."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_services(server)
    health_servicer = health.aio.HealthServicer()
    await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    bound_port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return Server(server, health_servicer, bound_port)


async def is_serving(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """One health check; False for any failure."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


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
