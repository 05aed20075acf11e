"""A collector of OpenTelemetry traces that keeps what it is sent: the real OTLP/gRPC service, nothing behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from e2e_stack import wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

# Spans are sent once a second; a machine that is busy otherwise takes longer.
ARRIVAL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RecordedSpan:
    """Ids in hex; `parent_id` is empty for the first span of a trace. `events`: names with attributes."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    started_ns: int
    ended_ns: int
    is_error: bool

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]


class Collector(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[RecordedSpan] = []
        self.raw = b""
        self.url = ""

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        with self._lock:
            self.raw += request.SerializeToString()
            self._spans.extend(_spans_of(request))
        return pb.ExportTraceServiceResponse()

    def spans(self, trace_id: str = "") -> list[RecordedSpan]:
        with self._lock:
            return [span for span in self._spans if trace_id in ("", span.trace_id)]

    def wait(self, trace_id: str, is_whole: Callable[[list[RecordedSpan]], bool]) -> list[RecordedSpan]:
        """The trace's spans in order of their beginnings, once they are what `is_whole` says."""
        wait_until(lambda: is_whole(self.spans(trace_id)), ARRIVAL_TIMEOUT_S, f"the spans of trace {trace_id}")
        return sorted(self.spans(trace_id), key=lambda span: span.started_ns)


def _spans_of(request: pb.ExportTraceServiceRequest) -> Iterator[RecordedSpan]:
    for of_service in request.resource_spans:
        service = _values(of_service.resource.attributes)["service.name"]
        for span in (span for of_scope in of_service.scope_spans for span in of_scope.spans):
            yield RecordedSpan(
                service=service,
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                attributes=_values(span.attributes),
                events=[(event.name, _values(event.attributes)) for event in span.events],
                started_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def run_collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
