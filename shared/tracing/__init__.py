"""Distributed tracing, off unless a collector is named: what is here imports nothing of OpenTelemetry.

`tracing(endpoint, service)` yields None, or the tracer of otlp.py, which needs the packages of the extra `tracing`.

Not here: which spans there are (gateway/tracing.py, and the servers of verifier and drafter).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.tracing.otlp import Tracer

# For the three services' configs: the same setting, under vLLM's name.
OTLP_TRACES_ENDPOINT_HELP = (
    "OpenTelemetry collector that gets traces over OTLP/gRPC, http://host:4317 or https://host:4317; empty: no tracing."
)
# Headers and metadata that carry a trace from one service to the next: https://www.w3.org/TR/trace-context/
_CARRIED = ("traceparent", "tracestate")
# As much as everybody must pass on; a longer one, which is the caller's, could fill the metadata of a session's stream.
_MAX_TRACESTATE_CHARS = 512

Carrier = tuple[tuple[str, str], ...]
Attributes = Mapping[str, str | int | float | tuple[str, ...]]


@contextmanager
def tracing(endpoint: str, service: str) -> Iterator[Tracer | None]:
    """None without an endpoint. Raises ConfigError for an endpoint of another form, or when packages are missing."""
    if not endpoint:
        yield None
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint: {endpoint!r} is not http://host:port or https://host:port")
    try:
        from shared.tracing.otlp import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint: {error.name} is not installed; pip install 'outrider[tracing]'"
        ) from None
    tracer = Tracer(endpoint, service)
    try:
        yield tracer
    finally:
        tracer.close()


def carrier_of(headers: Iterable[tuple[str, str | bytes]]) -> Carrier:
    """What of HTTP headers or gRPC metadata says which trace a request is part of."""
    return tuple(
        (name, value)
        for name, value in headers
        if name in _CARRIED and isinstance(value, str) and (name != "tracestate" or len(value) <= _MAX_TRACESTATE_CHARS)
    )
