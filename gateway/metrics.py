"""Prometheus metrics of the gateway, under vLLM's names with our prefix."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry

from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.shared.messages import Commit, FinishReason
from outrider.shared.telemetry import REQUEST_BUCKETS, TOKEN_BUCKETS, MetricsOf

_FINE_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class DraftCame(Enum):
    """Tells whether a round got the draft that it wanted. EMPTY: the drafter had none; more drafters would not help.
    NO: no drafter had capacity, or the answer came too late or never. Probes that nobody waits for are NOT_WANTED.
    """

    YES = "yes"
    EMPTY = "empty"
    NO = "no"
    NOT_WANTED = ""


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = MetricsOf(registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.running = gauge("num_requests_running", "Choices being decoded.")
        self.waiting = gauge("num_requests_waiting", "Choices not started yet.")
        # What routers before several gateways choose by, with the two above (Gateway API inference extension, llm-d).
        self.kv_usage = gauge("fleet_kv_cache_usage_perc", "Share of the fleet's KV blocks in use, 0 to 1.")
        self.members = gauge("fleet_members", "Healthy members.", ("service",))
        self.verifier_kinds = gauge("verifier_kinds", "Kinds of arithmetic among the healthy verifiers.")
        self.log_restores = gauge("commit_log_restores", "Requests whose commits were lost by Redis and restored.")
        self.draft_timeouts = counter("draft_timeouts", "Proposals that timed out.")
        self._ahead = counter(
            "drafts_asked_ahead",
            "Proposals requested before the previous one was verified, by whether they were used.",
            ("used",),
        )
        for used in ("yes", "no"):
            self._ahead.labels(used)
        self.drafters_lost = counter("drafters_lost", "Drafters lost by a running session.")
        self.failovers = counter("verifier_failovers", "Sessions moved to another verifier.")
        self.resumed = counter("requests_resumed", "Requests to resume from an earlier connection.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of started choices.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in a prefix cache.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in a prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in a prefix cache.")
        self._generated = counter("generation_tokens", "Tokens emitted.")
        self._finished = counter("request_success", "Choices finished.", ("finished_reason",))
        for reason in FinishReason:
            self._finished.labels(reason.name.lower())
        self._failed = counter("request_failure", "Choices ended by an error.", ("error",))
        self._num_drafts = counter("spec_decode_num_drafts", "Rounds with a draft.", ("method",))
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens scored.", ("method",))
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", ("method",))
        self._draft_rounds = counter("draft_rounds", "Rounds that wanted a draft, by whether one came.", ("draft",))
        for came in (DraftCame.YES, DraftCame.EMPTY, DraftCame.NO):
            self._draft_rounds.labels(came.value)  # start at 0: autoscaling on a ratio needs all of its parts
        self._accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position in the draft.", ("position",)
        )
        self._saved = counter("seconds_saved", "Time of streams that speculation has saved, estimated.")
        self._lost = counter("seconds_lost", "Time of streams that speculation has cost, estimated.")
        self._ttft = histogram("time_to_first_token_seconds", "From request to first token.")
        self._itl = histogram("inter_token_latency_seconds", "Between two updates of a stream.")
        self._e2e = histogram("e2e_request_latency_seconds", "From request to last token.", REQUEST_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "From request to start.", REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "From start to first token.", REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "From first to last token.", REQUEST_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "From start to last token.", REQUEST_BUCKETS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Decode time of a choice by its tokens after the first update."
        )
        self._prompt_lens = histogram("request_prompt_tokens", "Prompt tokens of a finished choice.", TOKEN_BUCKETS)
        self._output_lens = histogram("request_generation_tokens", "Tokens of a finished choice.", TOKEN_BUCKETS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of a finished request's longest choice.", TOKEN_BUCKETS
        )
        self._params_n = histogram("request_params_n", "`n` of a finished request.", (1, 2, 5, 10, 20))
        self._params_max_tokens = histogram(
            "request_params_max_tokens", "`max_tokens` of a finished choice.", TOKEN_BUCKETS
        )
        # Tokens per second of both kinds of round show whether speculation pays.
        self._round = histogram("round_seconds", "One round: propose, verify.", labels=("speculation",))
        self._round_tokens = counter("round_tokens", "Tokens emitted by rounds.", ("speculation",))
        self._overhead = histogram("round_overhead_seconds", "Round time minus forward times.", _FINE_BUCKETS)

    def observe_round(self, round_s: float, overhead_s: float, num_tokens: int, *, speculation: bool) -> None:
        """Counts one round; prefills are not rounds. speculation: the round waited for a draft, with any outcome."""
        kind = "on" if speculation else "off"
        self._round.labels(kind).observe(round_s)
        self._round_tokens.labels(kind).inc(num_tokens)
        self._overhead.observe(overhead_s)

    def observe_draft(self, came: DraftCame) -> None:
        """Counts one round with a wanted draft; called for each round of a verifier's free run."""
        if came is not DraftCame.NOT_WANTED:
            self._draft_rounds.labels(came.value).inc()

    def observe_ahead(self, *, used: bool) -> None:
        """Counts a proposal requested ahead, once it is known whether its assumption held."""
        self._ahead.labels("yes" if used else "no").inc()

    def observe_commit(self, commit: Commit, method: str) -> None:
        self._generated.inc(len(commit.token_ids))
        if commit.num_draft_tokens:
            self._num_drafts.labels(method).inc()
            self._draft_tokens.labels(method).inc(commit.num_draft_tokens)
            self._accepted_tokens.labels(method).inc(commit.num_accepted_tokens)
            for position in range(commit.num_accepted_tokens):
                self._accepted_per_pos.labels(str(position)).inc()

    def observe_update(self, update: GenerationUpdate, since_start_s: float, since_last_s: float | None) -> None:
        if since_last_s is None:
            self._ttft.observe(since_start_s)
            self._cached_tokens.inc(update.num_cached_tokens)
        else:
            self._itl.observe(since_last_s)
        if update.speculation is not None:
            saved_s = 1e-6 * update.speculation.saved_us
            (self._saved if saved_s > 0.0 else self._lost).inc(abs(saved_s))
        if update.finish_reason is not None:
            self._e2e.observe(since_start_s)
            self._finished.labels(update.finish_reason.name.lower()).inc()

    def observe_start(self, prompt_len: int) -> None:
        self._prompt_tokens.inc(prompt_len)

    def observe_prefix(self, prompt_len: int, num_cached_tokens: int) -> None:
        """Counts one look into a prefix cache: both at the first token, so that hits by queries are a share."""
        self._prefix_queries.inc(prompt_len)
        self._prefix_hits.inc(num_cached_tokens)

    def observe_choice(self, request: ValidRequest, num_tokens: int, times: ChoiceTimes) -> None:
        """Counts one finished choice of `num_tokens`."""
        self._queue.observe(times.started_s - times.arrived_s)
        self._prefill.observe(times.first_s - times.started_s)
        self._decode.observe(times.last_s - times.first_s)
        self._inference.observe(times.last_s - times.started_s)
        if times.num_later_tokens:
            self._per_token.observe((times.last_s - times.first_s) / times.num_later_tokens)
        self._prompt_lens.observe(len(request.prompt_token_ids))
        self._output_lens.observe(num_tokens)
        self._params_max_tokens.observe(request.sampling_params.max_tokens)

    def observe_request(self, request: ValidRequest, longest: int) -> None:
        """Counts one request whose choices have all finished. longest: tokens of the longest."""
        self._params_n.observe(request.n)
        self._longest.observe(longest)

    def observe_failure(self, error: BaseException) -> None:
        self._failed.labels(type(error).__name__).inc()


@dataclass
class ChoiceTimes:
    """The times at which one choice arrived, was started, and gave its first and last tokens: seconds of one clock.

    num_later_tokens: of the updates after the first.
    """

    arrived_s: float
    started_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_later_tokens: int = 0


class RequestTimes:
    """Times one request, and reports its updates and finished choices. Replayed updates are not its own."""

    def __init__(self, metrics: GatewayMetrics, request: ValidRequest) -> None:
        self._metrics = metrics
        self._request = request
        now = time.perf_counter()
        self._choices = {start.choice_index: ChoiceTimes(now, now) for start in request.starts}
        self._num_running = len(request.starts)
        self._longest = 0

    def start(self, choice_index: int) -> None:
        """Marks the end of the choice's wait for a place."""
        self._choices[choice_index].started_s = time.perf_counter()
        self._metrics.observe_start(len(self._request.prompt_token_ids))

    def add(self, update: GenerationUpdate) -> None:
        choice, now = self._choices[update.choice_index], time.perf_counter()
        since_last_s = now - choice.last_s if choice.first_s else None
        if since_last_s is None:
            choice.first_s = now
            self._metrics.observe_prefix(len(self._request.prompt_token_ids), update.num_cached_tokens)
        else:
            choice.num_later_tokens += len(update.token_ids)
        choice.last_s = now
        self._metrics.observe_update(update, now - choice.arrived_s, since_last_s)
        if update.finish_reason is not None:
            self._finish(choice, update.base_len + len(update.token_ids))

    def _finish(self, choice: ChoiceTimes, num_tokens: int) -> None:
        self._metrics.observe_choice(self._request, num_tokens, choice)
        self._num_running -= 1
        self._longest = max(self._longest, num_tokens)
        if not self._num_running:
            self._metrics.observe_request(self._request, self._longest)
