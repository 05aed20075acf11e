"""Settings that several services have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.shared.config import setting
from outrider.shared.errors import ConfigError
from outrider.shared.listening import held_port
from outrider.shared.telemetry import LOG_FORMATS, PREFIX, PREFIXES
from outrider.shared.tls import TlsConfig, server_tls


@dataclass(frozen=True)
class CommonSettings:
    """Settings of all services; each has its own `port`."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "Port; 0 picks a free one.", minimum=0, maximum=65535)
    metrics_prefix: str = setting(
        PREFIX, "Prefix of the metrics' names; vllm: the names that dashboards for vLLM query.", choices=PREFIXES
    )
    tls_cert_file: str = setting("", "Certificate of the service (PEM); empty: no TLS.")
    tls_key_file: str = setting("", "Private key of the certificate.")
    tls_ca_file: str = setting("", "CA certificate; callers must present a certificate signed by it.")
    reflection: bool | None = setting(None, "gRPC reflection; auto: on loopback only.")
    drain_s: float = setting(30.0, "Seconds that running requests may continue after SIGTERM.", minimum=0)
    otlp_traces_endpoint: str = setting(
        "",
        "OpenTelemetry collector for traces over OTLP/gRPC, http://host:4317 or https://host:4317; empty: no tracing.",
    )
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "Form of the log: text, or one JSON object a line.", choices=LOG_FORMATS)

    def tls(self) -> TlsConfig | None:
        """Builds the TLS config; None without files. Raises ConfigError that names the wrong file."""
        return server_tls(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)


@dataclass(frozen=True)
class ServiceSettings(CommonSettings):
    """Settings of every service with a single gRPC server."""

    metrics_port: int = setting(0, "Port of /metrics; 0: no metrics.", minimum=0, maximum=65535)

    @contextmanager
    def held_ports(self) -> Iterator[None]:
        """Holds its ports while something is loaded. Raises ConfigError that names the setting of a busy one."""
        if self.port and self.port == self.metrics_port:
            raise ConfigError(f"--metrics-port: {self.port} is --port already", param="metrics_port")
        with held_port(self.host, self.port, "port"), held_port(self.host, self.metrics_port, "metrics-port"):
            yield
