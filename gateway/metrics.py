"""Prometheus metrics of the gateway, under vLLM's names with our prefix."""

from __future__ import annotations

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.requests import GenerationUpdate
from shared.messages import Commit
from shared.telemetry import TIME_BUCKETS

_FINE_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class DraftCame(Enum):
    """What became of a round's wish for a draft. EMPTY: a drafter answered that it has no idea; more of them would have
    none either. NO: nobody had a place, or the answer came too late, or never. Probes are no wish where nobody waits.
    """

    YES = "yes"
    EMPTY = "empty"
    NO = "no"
    NOT_WANTED = ""


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"outrider:{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...] = TIME_BUCKETS, labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(f"outrider:{name}", text, labels, buckets=buckets, registry=registry)

        self.running = Gauge("outrider:num_requests_running", "Choices being decoded.", registry=registry)
        self.members = Gauge("outrider:fleet_members", "Healthy members.", ["service"], registry=registry)
        self.verifier_kinds = Gauge(
            "outrider:verifier_kinds", "Kinds of arithmetic among the healthy verifiers.", registry=registry
        )
        self.log_restores = Gauge(
            "outrider:commit_log_restores", "Requests whose commits Redis had lost and got back.", registry=registry
        )
        self.draft_timeouts = counter("draft_timeouts", "Proposals that came too late.")
        self._ahead = counter(
            "drafts_asked_ahead",
            "Proposals asked for before the last one was verified: whether they were used.",
            ("used",),
        )
        for used in ("yes", "no"):
            self._ahead.labels(used)
        self.draft_hedges = counter("draft_hedges", "Proposals that a second drafter was asked for too.")
        self.draft_hedges_won = counter("draft_hedges_won", "Those that the second drafter gave first.")
        self.drafters_lost = counter("drafters_lost", "Drafters lost by a running session.")
        self.failovers = counter("verifier_failovers", "Sessions moved to another verifier.")
        self.resumed = counter("requests_resumed", "Requests that were to go on from an earlier connection.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of started choices.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in a prefix cache.")
        self._generated = counter("generation_tokens", "Tokens emitted.")
        self._finished = counter("request_success", "Choices finished.", ("finished_reason",))
        self._failed = counter("request_failure", "Choices ended by an error.", ("error",))
        self._num_drafts = counter("spec_decode_num_drafts", "Rounds with a draft.", ("method",))
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens scored.", ("method",))
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens emitted.", ("method",))
        self._draft_rounds = counter("draft_rounds", "Rounds that a draft was wanted for: whether it came.", ("draft",))
        for came in (DraftCame.YES, DraftCame.EMPTY, DraftCame.NO):
            self._draft_rounds.labels(came.value)  # at 0 from the start: who scales by a share needs all of its parts
        self._accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens emitted, by place in the draft.", ("position",)
        )
        self._ttft = histogram("time_to_first_token_seconds", "From request to first token.")
        self._itl = histogram("inter_token_latency_seconds", "Between two updates of a stream.")
        self._e2e = histogram("e2e_request_latency_seconds", "From request to last token.")
        # Tokens over seconds of the one and of the other kind of round say whether speculation pays.
        self._round = histogram("round_seconds", "One round: propose, verify.", labels=("speculation",))
        self._round_tokens = counter("round_tokens", "Tokens of these rounds.", ("speculation",))
        self._overhead = histogram("round_overhead_seconds", "Round less forward times.", _FINE_BUCKETS)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def observe_round(self, round_s: float, overhead_s: float, num_tokens: int, *, speculation: bool) -> None:
        """speculation: the round waited for a draft, whatever came of it. Prefills are no rounds."""
        kind = "on" if speculation else "off"
        self._round.labels(kind).observe(round_s)
        self._round_tokens.labels(kind).inc(num_tokens)
        self._overhead.observe(overhead_s)

    def observe_draft(self, came: DraftCame) -> None:
        """Of a round; what its verifier does alone in a free run counts round by round."""
        if came is not DraftCame.NOT_WANTED:
            self._draft_rounds.labels(came.value).inc()

    def observe_ahead(self, *, used: bool) -> None:
        """A proposal that was asked for ahead, once it is known whether what it stands on has come true."""
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
        if update.finish_reason is not None:
            self._e2e.observe(since_start_s)
            self._finished.labels(update.finish_reason.name.lower()).inc()

    def observe_start(self, prompt_len: int) -> None:
        self._prompt_tokens.inc(prompt_len)

    def observe_failure(self, error: BaseException) -> None:
        self._failed.labels(type(error).__name__).inc()
