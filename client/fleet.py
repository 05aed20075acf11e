"""The fleet as a gateway sees it (GET /fleet), and rates from two samples of its /metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.client.metrics_text import sums
from outrider.client.rest import clear_transport, get_json, refusal
from outrider.shared.errors import InvalidRequest, OutriderError

_DRAFT_TOKENS = "spec_decode_num_draft_tokens_total"
_ACCEPTED_TOKENS = "spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Counts:
    """The gateway's counters since its start, sampled at `at_s` (monotonic seconds)."""

    at_s: float
    num_tokens: float
    num_requests: float
    num_failures: float
    num_draft_tokens: float
    num_accepted_tokens: float
    # Estimated time that speculation has saved, net of its cost.
    saved_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Rates over `seconds`. acceptance_rate is None when nothing was drafted."""

    seconds: float
    tokens_per_s: float
    requests_per_s: float
    failures_per_s: float
    acceptance_rate: float | None
    # Since the gateway's start.
    saved_s: float = 0.0


def read_fleet(client: httpx.Client) -> dict[str, Any]:
    """GET /fleet. Raises OutriderError."""
    try:
        return get_json(client, "/fleet")
    except InvalidRequest as error:
        raise OutriderError(f"{client.base_url} has no /fleet (is it an Outrider gateway?): {error.message}") from None


def read_counts(client: httpx.Client) -> Counts:
    """The gateway's counters. Raises OutriderError, also when /metrics needs an API key."""
    with clear_transport(str(client.base_url)):
        reply = client.get("/metrics")
    if reply.status_code != 200:
        raise refusal(reply.status_code, reply.text, asked_for="/metrics")
    found = {name.rpartition(":")[2]: value for name, value in sums(reply.text).items()}  # of any --metrics-prefix

    def count(name: str) -> float:
        return found.get(name, 0.0)

    return Counts(
        at_s=time.monotonic(),
        num_tokens=count("generation_tokens_total"),
        num_requests=count("request_success_total"),
        num_failures=count("request_failure_total"),
        num_draft_tokens=count(_DRAFT_TOKENS),
        num_accepted_tokens=count(_ACCEPTED_TOKENS),
        saved_s=count("seconds_saved_total") - count("seconds_lost_total"),
    )


def rates(earlier: Counts, later: Counts) -> Rates:
    """Rates between two samples, never negative: a restarted gateway counts from 0 again."""
    seconds = max(later.at_s - earlier.at_s, 1e-9)

    num_draft_tokens = max(0.0, later.num_draft_tokens - earlier.num_draft_tokens)
    return Rates(
        seconds=seconds,
        tokens_per_s=max(0.0, later.num_tokens - earlier.num_tokens) / seconds,
        requests_per_s=max(0.0, later.num_requests - earlier.num_requests) / seconds,
        failures_per_s=max(0.0, later.num_failures - earlier.num_failures) / seconds,
        acceptance_rate=max(0.0, later.num_accepted_tokens - earlier.num_accepted_tokens) / num_draft_tokens
        if num_draft_tokens
        else None,
        saved_s=later.saved_s,
    )
