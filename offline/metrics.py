"""The results of `get_metrics`, in vLLM's classes and under its names, for scripts that look for `vllm:`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family

from outrider.shared.telemetry import Exposed, model_labels

_PREFIX = "vllm"
_PER_POSITION = f"{_PREFIX}:spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: float


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    """Counters by their position, such as accepted draft tokens by position in the draft."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """buckets: by upper bound, as text, the number of observations up to it; "+Inf": all."""

    count: int
    sum: float
    buckets: dict[str, int]


def snapshot(registries: Sequence[CollectorRegistry], model_name: str) -> list[Metric]:
    """All metrics of the registries, each with the labels that a scrape has."""
    labels = model_labels(model_name)
    families = (family for one in registries for family in Exposed(one, _PREFIX, lambda: labels).collect())
    return [metric for family in families for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
    elif family.name == _PER_POSITION:
        yield from _vectors(family)
    else:
        kind, name = (Counter, f"{family.name}_total") if family.type == "counter" else (Gauge, family.name)
        for sample in family.samples:
            if sample.name == name:
                yield kind(family.name, sample.labels, _number(sample.value))


def _histograms(family: Family) -> Iterator[Histogram]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        one = found.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            one.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            one.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            one.sum = sample.value
    yield from found.values()


def _vectors(family: Family) -> Iterator[Vector]:
    values: dict[int, int] = {}
    labels: dict[str, str] = {}
    for sample in family.samples:
        if sample.name == f"{family.name}_total":
            labels = {name: value for name, value in sample.labels.items() if name != "position"}
            values[int(sample.labels["position"])] = int(sample.value)
    if values:
        yield Vector(family.name, labels, [values.get(position, 0) for position in range(max(values) + 1)])


def _number(value: float) -> float:
    """Whole numbers as int: that is how scripts print them."""
    return int(value) if value.is_integer() else value
