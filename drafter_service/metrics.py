"""Prometheus metrics of the drafter."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.shared.messages import Proposal, Timings
from outrider.shared.telemetry import TIME_BUCKETS


class DrafterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._proposals = Counter("outrider:proposals", "Proposals made.", ["method"], registry=registry)
        self._tokens = Counter("outrider:proposed_tokens", "Draft tokens proposed.", ["method"], registry=registry)
        self._seconds = Histogram(
            "outrider:draft_seconds",
            "One batch of proposals.",
            ["method"],
            buckets=TIME_BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "outrider:draft_queue_seconds",
            "Queueing time of a step.",
            ["method"],
            buckets=TIME_BUCKETS,
            registry=registry,
        )
        self._running = Gauge("outrider:sessions_open", "Open sessions.", registry=registry)

    def watch(self, num_sessions: Callable[[], int]) -> None:
        """Exports `num_sessions`, which is called at every scrape, on its thread."""
        self._running.set_function(num_sessions)

    def observe(self, proposal: Proposal, timings: Timings) -> None:
        self._proposals.labels(proposal.method).inc()
        self._tokens.labels(proposal.method).inc(len(proposal.token_ids))
        self._seconds.labels(proposal.method).observe(timings.forward_us * 1e-6)
        self._queue.labels(proposal.method).observe(timings.queue_us * 1e-6)
