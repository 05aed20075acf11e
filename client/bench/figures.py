"""A benchmark's figures, under the names of vLLM's result files.

TTFT: from sending a request to its first text. TPOT: (last text - first text) / (output tokens - 1), for requests of at
least two tokens. ITL: between two updates of a stream. E2EL: from sending to the last text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from outrider.client.bench.request import RequestResult
from outrider.client.bench.run import BenchRun

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the nearest ranks, as numpy's default; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(run: BenchRun, percentiles: Sequence[float]) -> dict[str, Any]:
    """Times end in _ms; throughputs are per second over `duration`."""
    done = [result for result in run.results if not result.error]
    num_input = sum(result.num_prompt_tokens or 0 for result in done)
    num_output = sum(result.num_output_tokens for result in done)
    seconds = run.seconds or math.inf
    found: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(done),
        "failed": len(run.results) - len(done),
        # Requests without usage in the answer: updates count as output tokens, prompt tokens are unknown.
        "without_usage": sum(result.num_prompt_tokens is None for result in done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
    }
    for metric, values in _values_ms(done).items():
        found[f"mean_{metric}_ms"] = fmean(values) if values else 0.0
        found[f"median_{metric}_ms"] = percentile(values, 50)
        found[f"std_{metric}_ms"] = pstdev(values) if values else 0.0
        for percent in percentiles:
            found[f"p{percent:g}_{metric}_ms"] = percentile(values, percent)
    if run.acceptance is not None and run.acceptance.num_drafts:
        found |= {
            "spec_decode_acceptance_rate": 100 * run.acceptance.rate,
            "spec_decode_acceptance_length": run.acceptance.length,
            "spec_decode_num_drafts": run.acceptance.num_drafts,
            "spec_decode_draft_tokens": run.acceptance.num_draft_tokens,
            "spec_decode_accepted_tokens": run.acceptance.num_accepted_tokens,
        }
    errors = Counter(result.error for result in run.results if result.error)
    found["errors"] = [{"message": message, "count": count} for message, count in errors.most_common()]
    return found


def _values_ms(done: Sequence[RequestResult]) -> dict[str, list[float]]:
    return {
        "ttft": [1e3 * result.first_token_s for result in done],
        "tpot": [
            1e3 * (result.seconds - result.first_token_s) / (result.num_output_tokens - 1)
            for result in done
            if result.num_output_tokens > 1
        ],
        "itl": [1e3 * gap_s for result in done for gap_s in result.gaps_s],
        "e2el": [1e3 * result.seconds for result in done],
    }
