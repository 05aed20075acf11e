"""get_metrics: vLLM's names and classes, with the numbers of the registry and of the outputs."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client import Histogram as PrometheusHistogram

from outrider.offline import LLM, Counter, Gauge, Histogram, SamplingParams, Vector
from outrider.offline.metrics import snapshot

MODELS = Path(__file__).parents[2] / "models"
OF_MODEL = {"model_name": "m", "engine": "0"}


def test_each_class_has_what_was_counted() -> None:
    registry = CollectorRegistry()
    drafts = PrometheusCounter("outrider:spec_decode_num_drafts", "Drafts.", ["method"], registry=registry)
    drafts.labels("ngram").inc(3)
    drafts.labels("eagle").inc(2)
    PrometheusCounter("outrider:seconds_saved", "Seconds.", registry=registry).inc(0.5)
    PrometheusGauge("outrider:kv_cache_usage_perc", "Share.", registry=registry).set(0.25)
    per_pos = "outrider:spec_decode_num_accepted_tokens_per_pos"
    positions = PrometheusCounter(per_pos, "Accepted.", ["position"], registry=registry)
    for position, count in (("0", 9), ("2", 4), ("10", 1)):
        positions.labels(position).inc(count)
    times = PrometheusHistogram("outrider:request_decode_time_seconds", "Times.", buckets=(1, 2), registry=registry)
    times.observe(0.5)
    times.observe(1.5)
    times.observe(7)
    assert snapshot([registry], "m") == [
        Counter("vllm:spec_decode_num_drafts", {**OF_MODEL, "method": "ngram"}, 3),
        Counter("vllm:spec_decode_num_drafts", {**OF_MODEL, "method": "eagle"}, 2),
        Counter("vllm:seconds_saved", OF_MODEL, 0.5),
        Gauge("vllm:kv_cache_usage_perc", OF_MODEL, 0.25),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", OF_MODEL, [9, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1]),
        Histogram("vllm:request_decode_time_seconds", OF_MODEL, 3, 9.0, {"1.0": 1, "2.0": 2, "+Inf": 3}),
    ]


def test_a_batch_is_counted_as_its_outputs_say() -> None:
    draft = {"model": MODELS / "demo-draft", "method": "draft_model", "num_speculative_tokens": 3}
    prompts = ["import os", "def main():", "for i in"]
    with LLM(MODELS / "demo-target", speculative_config=draft, num_threads=1, kv_cache_mb=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        metrics = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
    figures = [output.metrics.speculative_decoding for output in outputs]
    accepted = sum(one["num_accepted_draft_tokens"] for one in figures if one is not None)

    def value(name: str) -> float:
        metric = metrics[name]
        assert isinstance(metric, Counter)
        return metric.value

    assert value("spec_decode_num_accepted_tokens") == accepted > 0
    assert value("spec_decode_num_drafts") == sum(one["num_spec_steps"] for one in figures if one is not None)
    assert value("prompt_tokens") == sum(len(output.prompt_token_ids) for output in outputs)
    assert value("generation_tokens") == 3 * 24
    per_position = metrics["spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_position, Vector)
    assert sum(per_position.values) == accepted
    assert len(per_position.values) <= 3
    decode, iterations = metrics["request_decode_time_seconds"], metrics["iteration_tokens_total"]
    assert isinstance(decode, Histogram)
    assert isinstance(iterations, Histogram)
    assert decode.count == 3
    assert decode.sum > 0
    # Every token was read or written by one forward pass.
    assert iterations.sum >= 3 * 24
    usage = metrics["kv_cache_usage_perc"]
    assert isinstance(usage, Gauge)
    assert usage.labels == {"model_name": "demo-target", "engine": "0"}
    assert 0 <= usage.value < 1
