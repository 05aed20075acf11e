"""From the gateway's settings to its two doors and to its channels inwards: TLS, limits, what is shown.

Not here: the doors' own code (app.py, grpc_server.py) and the guards in front of them (http_admission.py,
grpc_admission.py).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvicorn
from fastapi import FastAPI

from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.grpc_admission import GrpcAdmission
from gateway.http_protocol import HttpLimits, protocol_factory
from shared import rpc
from shared.service import is_enabled_at
from shared.tls import TlsConfig, client_tls, server_tls

# Over the bound of requests: health checks, refusals and GetModel take a moment too, and must not be refused for it.
_SPARE_RPCS = 256


@dataclass(frozen=True)
class DoorsTls:
    """The doors' own TLS, and that towards the fleet; None is plain."""

    server: TlsConfig | None
    fleet: TlsConfig | None


def load_tls(config: GatewayConfig) -> DoorsTls:
    """Raises ConfigError that names the setting."""
    return DoorsTls(
        server=server_tls(config.tls_cert_file, config.tls_key_file, config.tls_ca_file),
        fleet=client_tls(
            config.fleet_tls_cert_file, config.fleet_tls_key_file, config.fleet_tls_ca_file, setting="fleet-tls"
        ),
    )


def http_config(config: GatewayConfig, app: FastAPI, tls: TlsConfig | None) -> uvicorn.Config:
    """For uvicorn.Server."""
    limits = HttpLimits(
        max_connections=config.max_connections,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
    )
    factory: Any = protocol_factory(limits)  # uvicorn's type says class, all it does is call
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


def grpc_door(config: GatewayConfig, admission: Admission, tls: TlsConfig | None) -> rpc.Door:
    """For rpc.start_server. A request is as long as a body may be, far under what the services say to each other."""
    return rpc.Door(
        tls=tls,
        reflection=is_enabled_at(config.host, config.reflection),
        max_receive_bytes=int(config.max_body_mb * 2**20),
        max_concurrent_rpcs=config.max_concurrent_requests + _SPARE_RPCS,
        interceptors=(GrpcAdmission(admission),),
    )


def fleet_channels(tls: TlsConfig | None) -> Callable[[str, str], grpc.aio.Channel]:
    """Opens a channel to an address; the second argument is the name that the certificate there must carry."""
    return lambda address, server_name: rpc.open_channel(address, tls, server_name)
