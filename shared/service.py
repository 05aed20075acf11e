"""The life cycle of a gRPC service process: bind, report SERVING, wait for a signal, drain."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from outrider.shared import rpc
from outrider.shared.errors import ConfigError, OutriderError
from outrider.shared.settings import ServiceSettings
from outrider.shared.telemetry import Exposed, serve_metrics, setup_logging
from outrider.shared.tls import TlsConfig


@dataclass(frozen=True)
class ServedApi:
    """One gRPC service: its short name for logs, its full name, and the function that adds it to a server."""

    service: str
    grpc_name: str
    add_to: Callable[[grpc.aio.Server], None]


def is_enabled_at(host: str, setting: bool | None) -> bool:
    """Returns whether developer aids (reflection, API docs) are served. None: on loopback only."""
    return is_loopback(host) if setting is None else setting


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_callers_known(settings: ServiceSettings, option: str) -> None:
    """Raises ConfigError for an option that lets callers change what is served, where anyone may call."""
    if not (is_loopback(settings.host) or settings.tls_ca_file):
        raise ConfigError(
            f"--{option}: anyone may call {settings.host}; give --tls-ca-file, or listen on 127.0.0.1",
            param=option.replace("-", "_"),
        )


async def serve_until_signal(
    api: ServedApi,
    settings: ServiceSettings,
    tls: TlsConfig | None,
    registry: CollectorRegistry,
    *,
    start: Callable[[], None],
    stop: Callable[[], None],
    metric_labels: Mapping[str, str] | None = None,
) -> None:
    """Prints one line with the port once SERVING; SIGTERM and SIGINT drain. metric_labels: of every series."""
    options = rpc.ServerOptions(tls=tls, reflection=is_enabled_at(settings.host, settings.reflection))
    server = await rpc.start_server(settings.host, settings.port, api.add_to, (api.grpc_name,), options)
    metrics = Exposed(registry, settings.metrics_prefix, lambda: metric_labels or {})
    stop_metrics = (
        serve_metrics(metrics, settings.host, settings.metrics_port) if settings.metrics_port else lambda: None
    )
    start()
    async with rpc.until_signal() as signalled:
        await server.serving()
        print(f"{api.service} serving on {settings.host}:{server.port}", flush=True)
        await signalled.wait()
        await server.drain(settings.drain_s)
    stop()
    stop_metrics()


def run_service(service: str, main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Exit code 0; 2 for a wrong setting, a refused model or a busy port; 1 for a bug. Both are logged. 130 for Ctrl-C
    while loading.
    """
    try:
        uvloop.run(main())
    except OutriderError as error:
        setup_logging(service, "info").error(error.message)  # where no setting has set it up yet
        return 2
    except KeyboardInterrupt:  # while loading; later it drains
        return 130
    except Exception:
        setup_logging(service, "info").critical("ended by an unexpected error", exc_info=True)
        return 1
    return 0
