"""Builds the HTTP server, the gRPC server and the fleet's channels from the gateway's settings: TLS, limits, docs.

Not here: the servers' code (http/app.py, grpc_server.py) and their admission (http/admission.py, grpc_admission.py).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvicorn
from fastapi import FastAPI

from outrider.gateway.admission.auth import Admission
from outrider.gateway.config import GatewayConfig
from outrider.gateway.servers.grpc_admission import GrpcAdmission
from outrider.gateway.servers.http.protocol import HttpLimits, protocol_factory
from outrider.shared import rpc
from outrider.shared.service import is_enabled_at
from outrider.shared.tls import TlsConfig, client_tls

# RPCs above the request limit, for health checks, refusals and GetModel, which must not be refused for lack of a slot
_SPARE_RPCS = 256


@dataclass(frozen=True)
class GatewayTls:
    """TLS of the gateway's servers, and towards the fleet; None is plaintext."""

    server: TlsConfig | None
    fleet: TlsConfig | None


def load_tls(config: GatewayConfig) -> GatewayTls:
    """Raises ConfigError that names the setting."""
    return GatewayTls(
        server=config.tls(),
        fleet=client_tls(
            config.fleet_tls_cert_file, config.fleet_tls_key_file, config.fleet_tls_ca_file, setting="fleet-tls"
        ),
    )


def http_config(config: GatewayConfig, app: FastAPI, tls: TlsConfig | None) -> uvicorn.Config:
    """Returns the configuration for uvicorn.Server."""
    limits = HttpLimits(
        max_connections=config.max_connections,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
    )
    factory: Any = protocol_factory(limits)  # uvicorn's type says class, but it only calls it
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=factory,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, int(config.drain_s)),
        **({} if tls is None else _uvicorn_tls(tls)),
    )


def _uvicorn_tls(tls: TlsConfig) -> dict[str, Any]:
    return {
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_ca_certs": tls.ca_file or None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE,
    }


def grpc_options(config: GatewayConfig, admission: Admission, tls: TlsConfig | None) -> rpc.ServerOptions:
    """Returns rpc.start_server's options. Requests are limited like HTTP bodies, far below the fleet's message size."""
    num_rpcs = config.max_concurrent_requests + _SPARE_RPCS
    return rpc.ServerOptions(
        tls=tls,
        reflection=is_enabled_at(config.host, config.reflection),
        max_receive_bytes=int(config.max_body_mb * 2**20),
        max_concurrent_rpcs=2 * num_rpcs,  # half of them without their first message
        max_waiting=num_rpcs,
        first_message_s=config.body_timeout_s,
        max_connections=config.max_connections,
        interceptors=(GrpcAdmission(admission),),
    )


def fleet_channels(tls: TlsConfig | None) -> Callable[[str, str], grpc.aio.Channel]:
    """A function (address, name in its certificate) -> channel."""
    return lambda address, server_name: rpc.open_channel(address, tls, server_name)
