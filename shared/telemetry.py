"""Logs and the metrics port of the services that have no HTTP door of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

# Buckets in seconds that resolve a 1 ms round as well as a long prefill.
TIME_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def setup_logging(service: str, level: str) -> logging.Logger:
    """One line per record on stderr, with the service's name. Prompts and outputs are never logged."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s",
    )
    return logging.getLogger(service)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serves /metrics on its own thread; returns what stops it. Port 0 in a config means: do not call this."""
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
