"""Prometheus metrics of the verifier; where vLLM has the metric, its name with our prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from outrider.engine.attention.block_manager import BlockManager
from outrider.shared.messages import Commit
from outrider.shared.telemetry import MetricsOf
from outrider.verifier_service.round import ForwardTimes
from outrider.verifier_service.scheduler import Work

# rows; histogram buckets, to twice the default --max-num-batched-tokens
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# tokens; vLLM's buckets of the same metric
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class VerifierMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricsOf(registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self._emitted = counter("committed_tokens", "Tokens committed.")
        self._drafts = counter("verified_draft_tokens", "Draft tokens scored.")
        self._accepted = counter("accepted_draft_tokens", "Draft tokens committed.")
        self._rows = counter("forward_rows", "Rows of forward passes.", ("kind",))
        self._sampling = counter("verify_rows", "Rounds of sessions, by whether they had a draft.", ("draft",))
        self._forward = histogram("forward_seconds", "One forward pass of the target.")
        self._drafting = histogram("local_draft_seconds", "Local drafting before one forward pass.")
        self._queue = histogram("step_queue_seconds", "Queueing time of a step.")
        self._batch_rows = histogram("forward_batch_rows", "Rows per forward pass.", _ROW_BUCKETS)
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._preemptions = counter("num_preemptions", "Sessions preempted.")
        self._num_preemptions = 0
        self._iteration_tokens = histogram(
            "iteration_tokens_total", "Prompt tokens read and tokens committed by one forward pass.", _TOKEN_BUCKETS
        )
        self._running = gauge("sessions_open", "Open sessions.")
        self._waiting = gauge("sessions_waiting", "Sessions with a step waiting for its forward pass.")
        self._certificate = gauge("row_invariance_certificate", "1 if exact mode is certified.")

    def watch(self, num_sessions: Callable[[], int], num_waiting: Callable[[], int], blocks: BlockManager) -> None:
        """Exports gauges, read at every scrape on its thread. Cached blocks of no session are free, as in vLLM."""
        self._running.set_function(num_sessions)
        self._waiting.set_function(num_waiting)
        self._kv_usage.set_function(lambda: 1.0 - blocks.num_free_blocks / blocks.num_blocks)

    def observe_certificate(self, holds: bool) -> None:
        self._certificate.set(1 if holds else 0)

    def observe_forward(
        self, plan: Sequence[Work], times: ForwardTimes, num_preemptions: int, num_committed_tokens: int
    ) -> None:
        num_drafts = sum(work.num_rows - work.num_chain_rows for work in plan)
        num_rows = sum(work.num_rows for work in plan)
        self._forward.observe(times.ended - times.started)
        self._batch_rows.observe(num_rows)
        self._rows.labels("draft").inc(num_drafts)
        self._rows.labels("committed").inc(num_rows - num_drafts)
        num_prompt_rows = sum(work.num_chain_rows for work in plan if work.num_chain_rows > 1)
        self._iteration_tokens.observe(num_prompt_rows + num_committed_tokens)
        self._preemptions.inc(num_preemptions - self._num_preemptions)
        self._num_preemptions = num_preemptions

    def observe_drafting(self, seconds: float) -> None:
        """Records the seconds of local drafting; 0: no session was drafted for."""
        if seconds > 0.0:
            self._drafting.observe(seconds)

    def observe_commit(self, commit: Commit) -> None:
        self._emitted.inc(len(commit.token_ids))
        self._drafts.inc(commit.num_draft_tokens)
        self._accepted.inc(commit.num_accepted_tokens)
        self._sampling.labels("yes" if commit.num_draft_tokens else "no").inc()
        self._queue.observe(commit.timings.queue_us * 1e-6)
