"""Logs and the metrics port of the services that have no HTTP door of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

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
    """Serves /metrics on its own thread; returns what stops it. Port 0 in a config means: do not call this.

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

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
