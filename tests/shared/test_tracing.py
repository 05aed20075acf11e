"""Tracing by itself: what is loaded when it is off, which settings it takes, and a collector that is not there.

The real stack with a real collector is in tests/e2e/test_tracing.py.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from outrider.shared.errors import ConfigError
from outrider.shared.tracing import carrier_of
from outrider.shared.tracing.setup import tracing
from tests.ports import nobodys_port

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OF_TRACING = (
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter",
    "opentelemetry.proto",
    "outrider.shared.tracing.otlp",
)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("service", ["outrider.gateway", "outrider.verifier_service", "outrider.drafter_service"])
def test_nothing_of_it_is_loaded_when_it_is_off(service: str) -> None:
    """FastAPI and redis-py look for OpenTelemetry's API and metrics themselves; spans and exporters are ours alone."""
    code = (
        f"import sys, {service}.__main__\n"
        "from outrider.shared.tracing.setup import tracing\n"
        "with tracing('', 'test') as tracer: assert tracer is None\n"
        f"loaded = [name for name in sys.modules if name.startswith({OF_TRACING!r})]\n"
        "assert not loaded, loaded"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_missing_packages_are_named() -> None:
    code = (
        "import sys\nsys.modules['opentelemetry.sdk'] = None\n"
        "from outrider.shared.tracing.setup import tracing\n"
        "with tracing('http://127.0.0.1:4317', 'test'): pass"
    )
    assert "ConfigError: --otlp-traces-endpoint: opentelemetry.sdk" in run_python(code).stderr


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://host:1", "collector"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: '.*' is not http://host:port"),
        tracing(endpoint, "test"),
    ):
        pass


def test_spans_for_a_dead_collector_cost_neither_time_nor_memory() -> None:
    with tracing(f"http://127.0.0.1:{nobodys_port()}", "test") as tracer:
        assert tracer is not None
        request = tracer.start_request("request", (("traceparent", PARENT),), {})
        slowest_s = 0.0
        for _ in range(20_000):
            started = time.perf_counter()
            tracer.add_child("round", request, time.time_ns(), {"outrider.base_len": 1})
            slowest_s = max(slowest_s, time.perf_counter() - started)
        # An export to it is tried for 10 s; nobody who makes a span waits for that. A busy machine may take seconds.
        assert slowest_s < 8.0
        processor = tracer._provider._active_span_processor._span_processors[0]
        assert len(processor._batch_processor._queue) <= 8192  # type: ignore[attr-defined]
        closing = time.perf_counter()
    assert time.perf_counter() - closing < 8.0


def test_a_carrier_goes_on_with_the_callers_trace() -> None:
    with tracing(f"http://127.0.0.1:{nobodys_port()}", "test") as tracer:
        assert tracer is not None
        carrier = dict(tracer.carrier(tracer.start_request("request", (("traceparent", PARENT),), {})))
        version, trace_id, span_id, flags = carrier["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", PARENT.split("-")[1], "01")
    assert span_id != PARENT.split("-")[2]


def test_only_what_names_a_trace_is_carried() -> None:
    headers: list[tuple[str, str | bytes]] = [
        ("host", "x"),
        ("traceparent", PARENT),
        ("tracestate", "a=1"),
        ("traceparent-bin", b"\x00"),
    ]
    assert carrier_of(headers) == (("traceparent", PARENT), ("tracestate", "a=1"))
    # It would go into the metadata of every stream, which has room for 16 KB.
    assert carrier_of([("traceparent", PARENT), ("tracestate", "a=" + "x" * 600)]) == (("traceparent", PARENT),)
