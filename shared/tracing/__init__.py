"""Distributed tracing: shared types, and the trace context in a call's headers.

Not here: the switch (setup.py), the tracer (otlp.py), and which spans there are (gateway/request/tracing.py, and the
servers of verifier and drafter).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Headers and metadata with the trace context: https://www.w3.org/TR/trace-context/
_CARRIED = ("traceparent", "tracestate")
# characters; what every service must forward. A longer one could fill the metadata of a session's stream.
_MAX_TRACESTATE_CHARS = 512

Carrier = tuple[tuple[str, str], ...]
Attributes = Mapping[str, str | int | float | tuple[str, ...]]


def carrier_of(headers: Iterable[tuple[str, str | bytes]]) -> Carrier:
    """The trace context in HTTP headers or gRPC metadata."""
    return tuple(
        (name, value)
        for name, value in headers
        if name in _CARRIED and isinstance(value, str) and (name != "tracestate" or len(value) <= _MAX_TRACESTATE_CHARS)
    )
