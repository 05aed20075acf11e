"""Prometheus metrics of the drafter."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from outrider.shared.messages import Proposal, Timings
from outrider.shared.telemetry import MetricsOf


class DrafterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricsOf(registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self._proposals = counter("proposals", "Proposals made.", ("method",))
        self._tokens = counter("proposed_tokens", "Draft tokens proposed.", ("method",))
        self._seconds = histogram("draft_seconds", "One batch of proposals.", labels=("method",))
        self._queue = histogram("draft_queue_seconds", "Queueing time of a step.", labels=("method",))
        self._running = gauge("sessions_open", "Open sessions.")

    def watch(self, num_sessions: Callable[[], int]) -> None:
        """Exports `num_sessions`, which is called at every scrape, on its thread."""
        self._running.set_function(num_sessions)

    def observe(self, proposal: Proposal, timings: Timings) -> None:
        self._proposals.labels(proposal.method).inc()
        self._tokens.labels(proposal.method).inc(len(proposal.token_ids))
        self._seconds.labels(proposal.method).observe(timings.forward_us * 1e-6)
        self._queue.labels(proposal.method).observe(timings.queue_us * 1e-6)
