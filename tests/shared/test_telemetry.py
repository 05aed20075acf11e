"""The metrics port: the names stay as they are, whatever the scraper asks for."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from shared.telemetry import serve_metrics

_PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
_PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=1.0.0;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("accept", ["*/*", "text/plain;version=0.0.4", _PROMETHEUS_2, _PROMETHEUS_3])
def test_metrics_port(accept: str) -> None:
    registry = CollectorRegistry()
    Counter("outrider:test_tokens", "Tokens.", registry=registry).inc(3)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    stop = serve_metrics(registry, "127.0.0.1", port)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=5) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "outrider:test_tokens_total 3.0" in response.read().decode().splitlines()
    finally:
        stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
