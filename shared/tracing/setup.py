"""Turns tracing on if a collector is given; only then is OpenTelemetry imported.

`tracing(endpoint, service)` yields None, or the tracer of otlp.py, which needs the `tracing` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.shared.errors import ConfigError

if TYPE_CHECKING:
    from outrider.shared.tracing.otlp import Tracer


@contextmanager
def tracing(endpoint: str, service: str) -> Iterator[Tracer | None]:
    """Yields a tracer; None without an endpoint. Raises ConfigError for a malformed endpoint or missing packages."""
    if not endpoint:
        yield None
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint: {endpoint!r} is not http://host:port or https://host:port")
    try:
        from outrider.shared.tracing.otlp import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint: {error.name} is not installed; pip install 'outrider[tracing]'"
        ) from None
    tracer = Tracer(endpoint, service)
    try:
        yield tracer
    finally:
        tracer.close()
