"""The metrics port keeps names as they are, whatever the scraper asks for, and bounds connections; the log's form."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from outrider.shared.errors import ConfigError
from outrider.shared.telemetry import Exposed, serve_metrics
from tests.ports import server_port

_PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
_PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=1.0.0;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("accept", ["*/*", "text/plain;version=0.0.4", _PROMETHEUS_2, _PROMETHEUS_3])
def test_metrics_port(accept: str) -> None:
    registry = CollectorRegistry()
    Counter("outrider:test_tokens", "Tokens.", registry=registry).inc(3)
    port = server_port()
    stop = serve_metrics(Exposed(registry, "outrider", dict), "127.0.0.1", port)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "outrider:test_tokens_total 3.0" in response.read().decode().splitlines()
    finally:
        stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_a_scrape_has_the_prefix_and_the_labels_of_the_moment() -> None:
    registry = CollectorRegistry()
    Counter("outrider:tokens", "Tokens.", ["method"], registry=registry).labels("ngram").inc(3)
    Gauge("outrider:members", "Members.", registry=registry).set(2)
    Histogram("outrider:iteration_tokens_total", "Tokens.", buckets=(1, 8), registry=registry).observe(5)
    model = ""
    exposed = Exposed(registry, "vllm", lambda: {"model_name": model})

    def samples() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(exposed.render().decode())
        found = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
        return {
            (one.name, *(f"{name}={label}" for name, label in sorted(one.labels.items()))): one.value for one in found
        }

    assert samples()["vllm:members", "model_name="] == 2
    model = 'a "model"'
    name = f"model_name={model}"
    assert samples() == {
        ("vllm:tokens_total", "method=ngram", name): 3,
        ("vllm:members", name): 2,
        ("vllm:iteration_tokens_total_bucket", "le=1.0", name): 0,
        ("vllm:iteration_tokens_total_bucket", "le=8.0", name): 1,
        ("vllm:iteration_tokens_total_bucket", "le=+Inf", name): 1,
        ("vllm:iteration_tokens_total_count", name): 1,
        ("vllm:iteration_tokens_total_sum", name): 5,
    }


def test_a_taken_port_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--metrics-port: cannot listen on"):
            serve_metrics(Exposed(CollectorRegistry(), "outrider", dict), "127.0.0.1", port)


@pytest.fixture
def metrics_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    # Long enough for a look at them while all are held, on a busy machine too.
    monkeypatch.setattr("outrider.shared.telemetry._SCRAPE_TIMEOUT_S", 5.0)
    port = server_port()
    stop = serve_metrics(Exposed(CollectorRegistry(), "outrider", dict), "127.0.0.1", port)
    yield port
    stop()


def is_scraped(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("says", [b"", b"GET /metrics HTTP/1.1\r\nx: "])
def test_connections_that_never_finish_are_cut_and_bounded(metrics_port: int, says: bytes) -> None:
    """Each would hold a thread for ever otherwise."""
    num_threads = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", metrics_port)) for _ in range(40)]
    for connection in held:
        with suppress(OSError):
            connection.sendall(says)
    # Two threads for each that is served: the one that reads, and the one that will cut it.
    assert threading.active_count() <= num_threads + 2 * 16
    assert not is_scraped(metrics_port)
    deadline = time.monotonic() + 60
    while not is_scraped(metrics_port):
        assert time.monotonic() < deadline
        with suppress(OSError):
            held[0].send(b"a")  # a byte now and then keeps nobody's place
        time.sleep(0.1)
    for connection in held:
        connection.close()


_LOGS = """
import sys
from outrider.shared.telemetry import setup_logging
log = setup_logging("gateway", "info", sys.argv[1])
log.debug("not asked for")
log.info("on %s:%d", "[::1]", 8000)
try:
    raise ValueError("two\\nlines")
except ValueError:
    log.exception('a "quoted" failure')
"""


def logged(log_format: str) -> list[str]:
    command = [sys.executable, "-c", _LOGS, log_format]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr.splitlines()


def test_the_log_as_json_has_one_object_a_line() -> None:
    started, failed = [json.loads(line) for line in logged("json")]
    when = datetime.fromisoformat(started.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert started == {"level": "INFO", "service": "gateway", "logger": "gateway", "message": "on [::1]:8000"}
    assert (failed["level"], failed["message"]) == ("ERROR", 'a "quoted" failure')
    assert failed["exception"].endswith("ValueError: two\nlines")


def test_the_log_is_text_unless_asked_otherwise() -> None:
    assert logged("text")[0].endswith(" gateway INFO gateway: on [::1]:8000")
