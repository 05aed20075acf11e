"""The gateway's spans: one for a request, from validation to its last byte, and in it one for each round.

A verifier's `verify` and a drafter's `draft` of that round are children of the request too, made by themselves; all
spans of a round have the same `outrider.session_id`, `.epoch` and `.base_len`. Names of attributes are vLLM's where
vLLM has one. Never in a span: text, token ids, keys, messages of errors.

Made only with --otlp-traces-endpoint: without it, `ValidRequest.trace` is None and nothing here runs. With it a round
costs 34 us of CPU time, or 7 where the trace is not recorded; spans are encoded and sent on a thread of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.types import GenerationUpdate, SessionTrace
from outrider.shared.messages import Commit, SessionSpec, Timings
from outrider.shared.tracing import Attributes

if TYPE_CHECKING:
    from outrider.shared.tracing.otlp import Tracer


def traced(tracer: Tracer, prepared: Prepared) -> Prepared:
    """Begins the request's span and returns the request; the server that answers it ends the span."""
    trace = RequestSpan(tracer, prepared)
    requests = tuple(replace(request, trace=trace) for request in prepared.requests)
    return replace(prepared, requests=requests, end_trace=trace.end)


@contextmanager
def ending(prepared: Prepared) -> Iterator[None]:
    """Ends the request's span with the block, however that ends."""
    try:
        yield
    finally:
        if prepared.end_trace is not None:
            prepared.end_trace()


class RequestSpan:
    """A request's span (types.RequestTrace)."""

    def __init__(self, tracer: Tracer, prepared: Prepared) -> None:
        self._tracer = tracer
        self._span = tracer.start_request("request", prepared.carrier, _request_attributes(prepared))
        self.metadata = tracer.carrier(self._span)
        self._started = time.perf_counter()
        self._num_completion_tokens = 0
        self._finish_reasons: list[str] = []

    def observe(self, update: GenerationUpdate) -> None:
        if self._num_completion_tokens == 0:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", time.perf_counter() - self._started)
        self._num_completion_tokens += len(update.token_ids)
        if update.finish_reason is not None:
            self._finish_reasons.append(update.finish_reason.name.lower())

    def add_event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def lost_verifier(self, spec: SessionSpec, address: str, num_committed: int) -> None:
        """Records that the next epoch continues at another verifier, after num_committed tokens."""
        lost: Attributes = {"outrider.verifier": address, "outrider.num_committed_tokens": num_committed}
        self.add_event("verifier_lost", {**_of_session(spec), **lost})

    def fail(self, error: BaseException) -> None:
        self._tracer.fail(self._span, error)

    def end(self) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.completion_tokens": self._num_completion_tokens,
                "gen_ai.response.finish_reasons": tuple(self._finish_reasons),
                "gen_ai.latency.e2e": time.perf_counter() - self._started,
            }
        )
        self._span.end()

    def session(self, spec: SessionSpec) -> SessionTrace:
        return SessionSpans(self, spec)

    def add_round(self, started_ns: int, attributes: Attributes) -> None:
        self._tracer.add_child("round", self._span, started_ns, attributes)


class SessionSpans:
    """Spans of a session's rounds (types.SessionTrace). Each begins where the one before it ended."""

    def __init__(self, request: RequestSpan, spec: SessionSpec) -> None:
        self._request = request
        self._attributes = _of_session(spec)
        self._round_started_ns = time.time_ns()

    def add_round(self, commit: Commit, method: str, verify_s: float, draft_s: float, draft: Timings) -> None:
        """Adds a round's spans. verify_s, draft_s: how long the gateway waited for each; other timings are the
        services' own.
        """
        attributes: Attributes = {
            **self._attributes,
            "outrider.base_len": commit.base_len,
            "outrider.num_tokens": len(commit.token_ids),
            "outrider.num_draft_tokens": commit.num_draft_tokens,
            "outrider.num_accepted_tokens": commit.num_accepted_tokens,
            "outrider.method": method,
            "outrider.batch_sessions": commit.timings.batch_sessions,
            "outrider.verify.wait_us": int(verify_s * 1e6),
            "outrider.verify.queue_us": commit.timings.queue_us,
            "outrider.verify.forward_us": commit.timings.forward_us,
            "outrider.draft.wait_us": int(draft_s * 1e6),
            "outrider.draft.queue_us": draft.queue_us,
            "outrider.draft.forward_us": draft.forward_us,
        }
        self._request.add_round(self._round_started_ns, attributes)
        self._round_started_ns = time.time_ns()

    def add_event(self, name: str) -> None:
        self._request.add_event(name, self._attributes)


def _of_session(spec: SessionSpec) -> Attributes:
    return {"outrider.session_id": spec.session_id, "outrider.epoch": spec.epoch}


def _request_attributes(prepared: Prepared) -> Attributes:
    first = prepared.requests[0]
    params = first.sampling_params
    return {
        "gen_ai.request.id": prepared.options.answer_id,
        "gen_ai.response.model": prepared.options.model,
        "gen_ai.request.n": first.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": sum(len(request.prompt_token_ids) for request in prepared.requests),
        "outrider.mode": next((start.mode.name.lower() for start in first.starts), ""),
        "outrider.method": first.speculation.method,
    }
