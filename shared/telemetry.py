"""Logging, and the metrics port of services without an HTTP server."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.registry import Collector

from outrider.shared.errors import ConfigError

# seconds; fine enough for a 1 ms round, wide enough for a long prefill
TIME_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

# seconds; vLLM's buckets of whole requests, with finer ones below, where small models answer
REQUEST_BUCKETS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# tokens; vLLM's steps, to the longest contexts
TOKEN_BUCKETS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))

PREFIX = "outrider"
PREFIXES = (PREFIX, "vllm")
LOG_FORMATS = ("text", "json")

# connections; a scrape needs one for milliseconds, more or slower clients are cut off
_MAX_SCRAPES = 16
_SCRAPE_TIMEOUT_S = 10.0


class _Indented(logging.Formatter):
    """Every line that begins with a time begins a record: further lines of one, as of a traceback, are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


def setup_logging(service: str, level: str, log_format: str = "text") -> logging.Logger:
    """Records on stderr, as text or as JSON objects; Python's warnings too. Prompts and outputs are never logged."""
    handler = logging.StreamHandler()
    text = _Indented(f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    return logging.getLogger(service)


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """`time` is UTC in ISO 8601; `exception` is the traceback, if there is one."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class MetricsOf:
    """Makes a registry's metrics; names are without the prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"{PREFIX}:{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"{PREFIX}:{name}", text, labels, registry=self._registry)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float] = TIME_BUCKETS, labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"{PREFIX}:{name}", text, labels, buckets=buckets, registry=self._registry)


class Exposed(Collector):
    """A registry as it is scraped: its names under `prefix`, and `labels` in every series.

    labels: called at each scrape, since a gateway learns its model's name from its first verifier; an empty value is
    to Prometheus a label that is not there.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: Callable[[], Mapping[str, str]]) -> None:
        self._registry = registry
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        labels = self._labels()
        for family in self._registry.collect():
            shown = Metric(self._name(family.name), family.documentation, family.type, family.unit)
            shown.samples = [
                sample._replace(name=self._name(sample.name), labels={**labels, **sample.labels})
                for sample in family.samples
            ]
            yield shown

    def render(self) -> bytes:
        """Returns Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _name(self, name: str) -> str:
        return self._prefix + name.removeprefix(PREFIX)


def model_labels(model_name: str) -> dict[str, str]:
    """Returns the labels that vLLM's series have; `engine` counts data-parallel ranks there."""
    return {"model_name": model_name, "engine": "0"}


class _BoundedServer(ThreadingHTTPServer):
    """Serves at most `_MAX_SCRAPES` connections at a time; closes further ones at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._room = threading.BoundedSemaphore(_MAX_SCRAPES)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        cut = threading.Timer(_SCRAPE_TIMEOUT_S, _cut_off, (request,))
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._room.release()

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        # A scraper that disconnects is not an error.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _cut_off(connection: socket.socket) -> None:
    """Ends the read or write that its thread waits in; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def serve_metrics(metrics: Exposed, host: str, port: int) -> Callable[[], None]:
    """Serves /metrics on its own thread; returns a function that stops it. Raises ConfigError when the port is taken.

    Always Prometheus' plain text: in OpenMetrics, prometheus_client 0.26 writes our names' colon as an underscore, and
    its own server lets the scraper choose.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server finds it by this name
            body = metrics.render()
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not logged."""

    try:
        server = _BoundedServer((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}") from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
