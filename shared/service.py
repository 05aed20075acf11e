"""The life cycle of a gRPC service process: bind, report SERVING, wait for a signal, drain."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from outrider.shared import rpc
from outrider.shared.config import setting
from outrider.shared.errors import ConfigError, OutriderError
from outrider.shared.listening import held_port
from outrider.shared.telemetry import (
    LOG_FORMAT_HELP,
    LOG_FORMATS,
    METRICS_PREFIX_HELP,
    PREFIX,
    PREFIXES,
    Exposed,
    serve_metrics,
    setup_logging,
)
from outrider.shared.tls import TlsConfig, server_tls
from outrider.shared.tracing import OTLP_TRACES_ENDPOINT_HELP


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of every service with a single gRPC server; each has its own `port`."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "gRPC port; 0 picks a free one.", minimum=0, maximum=65535)
    metrics_port: int = setting(0, "Port of /metrics; 0: no metrics.", minimum=0, maximum=65535)
    metrics_prefix: str = setting(PREFIX, METRICS_PREFIX_HELP, choices=PREFIXES)
    tls_cert_file: str = setting("", "Certificate of the gRPC server (PEM); empty: no TLS.")
    tls_key_file: str = setting("", "Private key of the certificate.")
    tls_ca_file: str = setting("", "CA certificate; gateways must present a certificate signed by it.")
    reflection: bool | None = setting(None, "gRPC reflection; auto: on loopback only.")
    drain_s: float = setting(30.0, "Seconds that running sessions may continue after SIGTERM.", minimum=0)
    otlp_traces_endpoint: str = setting("", OTLP_TRACES_ENDPOINT_HELP)
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", LOG_FORMAT_HELP, choices=LOG_FORMATS)

    def tls(self) -> TlsConfig | None:
        """Builds the TLS config; None without files. Raises ConfigError that names the wrong file."""
        return server_tls(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)

    @contextmanager
    def held_ports(self) -> Iterator[None]:
        """Holds its ports while something is loaded. Raises ConfigError that names the setting of a busy one."""
        if self.port and self.port == self.metrics_port:
            raise ConfigError(f"--metrics-port: {self.port} is --port already", param="metrics_port")
        with held_port(self.host, self.port, "port"), held_port(self.host, self.metrics_port, "metrics-port"):
            yield


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
