"""Logs and the metrics port of the services that have no HTTP door of their own."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from shared.errors import ConfigError

# Buckets in seconds that resolve a 1 ms round as well as a long prefill.
TIME_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

# A scrape takes one connection for milliseconds. Whoever takes more of them, or takes his time, is cut off.
_MAX_SCRAPES = 16
_SCRAPE_TIMEOUT_S = 10.0


def setup_logging(service: str, level: str) -> logging.Logger:
    """One line per record on stderr, with the service's name. Prompts and outputs are never logged."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s",
    )
    return logging.getLogger(service)


class _BoundedServer(ThreadingHTTPServer):
    """At most `_MAX_SCRAPES` connections at a time; further ones are closed at once."""

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
        # A scraper that hangs up or says nothing is no news.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _cut_off(connection: socket.socket) -> None:
    """Ends whatever read or write its thread waits in; closing stays with that thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serves /metrics on its own thread; returns what stops it. Port 0 in a config means: do not call this.

    Raises ConfigError when the port is taken.

    Always Prometheus' plain text. prometheus_client's own server lets the scraper choose, and for the OpenMetrics that
    Prometheus 2 prefers it writes the colon in our names as an underscore (seen with 0.26).
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server finds it by this name
            body = generate_latest(registry)
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape every few seconds is no news."""

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
