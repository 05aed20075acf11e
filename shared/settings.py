"""Settings that several services have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.shared.config import setting
from outrider.shared.errors import ConfigError
from outrider.shared.listening import held_port
from outrider.shared.telemetry import LOG_FORMAT_HELP, LOG_FORMATS, METRICS_PREFIX_HELP, PREFIX, PREFIXES
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
