"""Sends spans to an OpenTelemetry collector over OTLP/gRPC; the only file that imports OpenTelemetry.

A thread sends spans in batches from a bounded queue. A slow or absent collector loses spans, never a request.
OpenTelemetry's own variables apply where we have no setting: OTEL_TRACES_SAMPLER (a request that comes with a trace
follows that trace's decision), OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.shared.rpc_session import SessionHandlers
from outrider.shared.tracing import Attributes, Carrier, carrier_of
from outrider.shared.version import outrider_version

# spans, one per round, about 1 KB each; holds seconds of a busy service
_MAX_QUEUED_SPANS = 8192
_MAX_BATCH_SPANS = 512
_BATCH_DELAY_MS = 1000.0
# seconds; a stopping process waits this long for the collector to take the queue
_LAST_EXPORT_S = 2.0

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
ReplyT = TypeVar("ReplyT")


class Tracer:
    """One service's tracer. Methods may be called from any thread and never wait for the collector."""

    def __init__(self, endpoint: str, service: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))
        resource = Resource.create({"service.name": f"outrider-{service}", "service.version": outrider_version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MAX_QUEUED_SPANS,
                max_export_batch_size=_MAX_BATCH_SPANS,
                schedule_delay_millis=_BATCH_DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("outrider", outrider_version())
        self._propagator = TraceContextTextMapPropagator()

    def start_request(self, name: str, carrier: Carrier, attributes: Attributes) -> Span:
        """Part of the caller's trace if it has one, else the root of a new trace."""
        parent = self._propagator.extract(dict(carrier), context=Context())
        return self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)

    def carrier(self, span: Span) -> Carrier:
        """Metadata that makes another service's spans children of `span`."""
        carried: dict[str, str] = {}
        self._propagator.inject(carried, set_span_in_context(span, Context()))
        return tuple(carried.items())

    def add_child(self, name: str, parent: Span, started_ns: int, attributes: Attributes) -> None:
        """A span that ends now. started_ns: Unix time in nanoseconds."""
        context = set_span_in_context(parent, Context())
        self._tracer.start_span(name, context, attributes=attributes, start_time=started_ns).end()

    def fail(self, span: Span, error: BaseException) -> None:
        """Records only the error's type: its message may quote the request."""
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def session(
        self,
        name: str,
        handlers: SessionHandlers[RequestT, ResultT, ReplyT],
        context: Any,
        attributes_of: Callable[[ResultT], Attributes],
    ) -> SessionHandlers[RequestT, ResultT, ReplyT]:
        """Wraps the handlers so that each result also makes a span, in the trace of the stream's metadata.

        The span's length comes from the result's timings. Without a trace in the metadata there are no spans.
        context: the call's. The first request has `open.session_id`, results have `timings` (shared.messages.Timings).
        """
        carrier = carrier_of(context.invocation_metadata() or ())
        if not carrier:
            return handlers
        parent = self._propagator.extract(dict(carrier), context=Context())
        session_id = ""

        async def open(first: Any, on_reply: Callable[[ResultT | Exception], None]) -> int:
            nonlocal session_id
            session_id = first.open.session_id
            return await handlers.open(first, on_reply)

        def format(result: Any) -> ReplyT:
            started_ns = time.time_ns() - result.timings.total_us * 1000
            attributes = {"outrider.session_id": session_id, **attributes_of(result)}
            self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=started_ns).end()
            return handlers.format(result)

        return dataclasses.replace(handlers, open=open, format=format)

    def close(self) -> None:
        """Sends the queue within a bounded time; the rest is lost."""
        last_export = threading.Thread(target=self._provider.force_flush, name="last-spans", daemon=True)
        last_export.start()
        last_export.join(_LAST_EXPORT_S)
        if last_export.is_alive():  # aborts the running export, so that the provider need not wait
            self._exporter.shutdown()
        self._provider.shutdown()
