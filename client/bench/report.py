"""A benchmark's figures as the table of vLLM's `bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.client.bench.figures import METRICS

_WIDTH = 50
_MAX_ERRORS = 3


def report_lines(found: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    """Yields the report's lines. found: the result of `figures`, with max_concurrency and request_rate."""
    yield " Serving Benchmark Result ".center(_WIDTH, "=")
    yield from _counts(found)
    for metric in metrics:
        yield METRICS[metric].center(_WIDTH, "-")
        for label, key in _statistics(percentiles):
            yield _line(f"{label} {metric.upper()} (ms):", found[f"{key}_{metric}_ms"])
    if "spec_decode_num_drafts" in found:
        yield "Speculative Decoding".center(_WIDTH, "-")
        yield _line("Acceptance rate (%):", found["spec_decode_acceptance_rate"])
        yield _line("Acceptance length:", found["spec_decode_acceptance_length"])
        yield _line("Drafts:", found["spec_decode_num_drafts"])
        yield _line("Draft tokens:", found["spec_decode_draft_tokens"])
        yield _line("Accepted tokens:", found["spec_decode_accepted_tokens"])
    yield "=" * _WIDTH
    if found["without_usage"]:
        yield (
            f"The server sent no usage with {found['without_usage']} answers: their updates count as output tokens, "
            "their input tokens are left out."
        )


def error_lines(found: dict[str, Any]) -> Iterator[str]:
    """The most frequent error messages."""
    errors = found["errors"]
    for error in errors[:_MAX_ERRORS]:
        yield f"{error['count']} x {error['message']}"
    if len(errors) > _MAX_ERRORS:
        yield f"and {len(errors) - _MAX_ERRORS} other messages"


def _counts(found: dict[str, Any]) -> Iterator[str]:
    yield _line("Successful requests:", found["completed"])
    yield _line("Failed requests:", found["failed"])
    if found["max_concurrency"]:
        yield _line("Maximum request concurrency:", found["max_concurrency"])
    if found["request_rate"] != "inf":
        yield _line("Request rate configured (RPS):", found["request_rate"])
    yield _line("Benchmark duration (s):", found["duration"])
    yield _line("Total input tokens:", found["total_input_tokens"])
    yield _line("Total generated tokens:", found["total_output_tokens"])
    yield _line("Request throughput (req/s):", found["request_throughput"])
    yield _line("Output token throughput (tok/s):", found["output_throughput"])
    yield _line("Total token throughput (tok/s):", found["total_token_throughput"])


def _statistics(percentiles: Sequence[float]) -> list[tuple[str, str]]:
    return [("Mean", "mean"), ("Median", "median"), *((f"P{percent:g}", f"p{percent:g}") for percent in percentiles)]


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:.2f}" if isinstance(value, float) else f"{label:<40} {value}"
