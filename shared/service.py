"""The life of a gRPC service process: bind, say SERVING, wait for a signal, drain."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from shared import rpc
from shared.errors import OutriderError
from shared.telemetry import serve_metrics
from shared.tls import TlsConfig


@dataclass(frozen=True)
class Endpoint:
    """Where a service listens and how long it drains; `tls` and `reflection` are for the gRPC port alone."""

    service: str
    grpc_name: str
    host: str
    port: int
    metrics_port: int
    drain_s: float
    tls: TlsConfig | None = None
    reflection: bool = True


def is_enabled_at(host: str, setting: bool | None) -> bool:
    """Whether what helps developers (reflection, the API's documentation) is served; None: on loopback only."""
    return _is_loopback(host) if setting is None else setting


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def serve_until_signal(
    endpoint: Endpoint,
    add_services: Callable[[grpc.aio.Server], None],
    registry: CollectorRegistry,
    *,
    start: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """Prints one line with the port once it is SERVING; SIGTERM and SIGINT drain."""
    door = rpc.Door(tls=endpoint.tls, reflection=endpoint.reflection)
    server = await rpc.start_server(endpoint.host, endpoint.port, add_services, (endpoint.grpc_name,), door)
    stop_metrics = (
        serve_metrics(registry, endpoint.host, endpoint.metrics_port) if endpoint.metrics_port else lambda: None
    )
    start()
    async with rpc.until_signal() as signalled:
        await server.serving()
        print(f"{endpoint.service} serving on {endpoint.host}:{server.port}", flush=True)
        await signalled.wait()
        await server.drain(endpoint.drain_s)
    stop()
    stop_metrics()


def run_service(service: str, main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Exit code 0, or 2 with one clear line for a wrong setting, a refused model or a taken port."""
    try:
        uvloop.run(main())
    except OutriderError as error:
        print(f"{service}: {error.message}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "address" not in str(error).lower() and "bind" not in str(error).lower():
            raise
        print(f"{service}: {error}", file=sys.stderr)
        return 2
    return 0
