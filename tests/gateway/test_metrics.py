"""What a scrape says of one request's times and lengths, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.metrics import GatewayMetrics, RequestTimes
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate, ValidRequest
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import FinishReason
from outrider.shared.sampling_params import SamplingParams, SpeculationMode


class Log:
    async def append(self, entry: LogEntry) -> None:
        pass


def update(choice_index: int, base_len: int, num_tokens: int, *, ends: bool = False) -> GenerationUpdate:
    reason = FinishReason.LENGTH if ends else None
    return GenerationUpdate(choice_index, base_len, tuple(range(num_tokens)), "", (), (), finish_reason=reason)


class Scrape:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def value(self, name: str, **labels: str) -> float:
        found = self._registry.get_sample_value(f"outrider:{name}", labels)
        assert found is not None, name
        return found

    def histogram(self, name: str) -> tuple[float, float]:
        return self.value(f"{name}_count"), self.value(f"{name}_sum")


def test_times_and_lengths_of_two_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first waits 1 s, reads 2 s, writes 4 s; the second starts when that one has ended, and is one token."""
    now = 100.0
    monkeypatch.setattr("outrider.gateway.metrics.time.perf_counter", lambda: now)
    metrics = GatewayMetrics(CollectorRegistry())
    scrape = Scrape(metrics.registry)
    starts = tuple(ChoiceStart(index, SpeculationMode.EXACT, 0, Log()) for index in range(2))
    request = ValidRequest("r", (1, 2, 3), SamplingParams(max_tokens=9), n=2, starts=starts)
    times = RequestTimes(metrics, request)
    now = 101.0
    times.start(0)
    now = 103.0
    times.add(replace(update(0, 0, 1), num_cached_tokens=2))
    now = 105.0
    times.add(update(0, 1, 3))
    now = 107.0
    times.add(update(0, 4, 5, ends=True))
    assert scrape.histogram("request_params_n") == (0, 0)  # the other choice still runs
    times.start(1)
    now = 107.5
    times.add(update(1, 0, 1, ends=True))
    assert {name: scrape.histogram(name) for name in ONE_A_CHOICE} == {
        "request_queue_time_seconds": (2, 1 + 7),
        "request_prefill_time_seconds": (2, 2 + 0.5),
        "request_decode_time_seconds": (2, 4 + 0),
        "request_inference_time_seconds": (2, 6 + 0.5),
        "e2e_request_latency_seconds": (2, 7 + 7.5),
        "time_to_first_token_seconds": (2, 3 + 7.5),
        "request_prompt_tokens": (2, 6),
        "request_generation_tokens": (2, 9 + 1),
        "request_params_max_tokens": (2, 18),
    }
    assert scrape.histogram("inter_token_latency_seconds") == (2, 2 + 2)
    assert scrape.histogram("request_time_per_output_token_seconds") == (1, 4 / 8)
    assert scrape.histogram("request_params_n") == (1, 2)
    assert scrape.histogram("request_max_num_generation_tokens") == (1, 9)
    assert scrape.value("prefix_cache_queries_total") == 6
    assert scrape.value("prefix_cache_hits_total") == 2
    assert scrape.value("request_success_total", finished_reason="length") == 2
    assert scrape.value("request_success_total", finished_reason="stop") == 0


ONE_A_CHOICE = (
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "e2e_request_latency_seconds", "time_to_first_token_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
)


def test_a_resumed_choice_counts_its_tokens_but_not_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens were written elsewhere: they are part of the output's length, not of the time per token here."""
    now = 0.0
    monkeypatch.setattr("outrider.gateway.metrics.time.perf_counter", lambda: now)
    metrics = GatewayMetrics(CollectorRegistry())
    starts = (ChoiceStart(0, SpeculationMode.EXACT, 0, Log(), epoch=1),)
    times = RequestTimes(metrics, ValidRequest("r", (1,), SamplingParams(max_tokens=44), starts=starts))
    times.start(0)
    now = 1.0
    times.add(update(0, 40, 2))
    now = 2.0
    times.add(update(0, 42, 2, ends=True))
    scrape = Scrape(metrics.registry)
    assert scrape.histogram("request_generation_tokens") == (1, 44)
    assert scrape.histogram("request_time_per_output_token_seconds") == (1, 0.5)
