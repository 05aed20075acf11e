"""reference/metrics.md: every metric of the three services, from the registries they fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from docs.generate.markdown import cell, code, table
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafting.serving.loading import DraftVersionMetrics
from outrider.drafting.serving.several import DraftHeadMetrics
from outrider.gateway.metrics import GatewayMetrics
from outrider.verifier_service.learning.record import LearningRecord
from outrider.verifier_service.metrics import VerifierMetrics

_INTRODUCTION = """# Metrics

Prometheus' text format: the gateway at `GET /metrics`, verifiers and drafters at `--metrics-port`. Where vLLM has a
metric, ours has its name with the prefix `outrider:`, or `vllm:` with `--metrics-prefix vllm`. Every series of the
gateway and of verifiers has the labels `model_name` and `engine` too, as there. Counters end in `_total` on the wire; a
histogram `X` comes as `X_bucket`, `X_sum` and `X_count`. Times are seconds. This page is made from the registries of
the services; a Grafana dashboard that uses them is in `deploy/grafana/`.
"""


def registries() -> Mapping[str, CollectorRegistry]:
    """Per service, its metrics at zero."""
    parts: dict[str, tuple[Callable[[CollectorRegistry], object], ...]] = {
        "gateway": (GatewayMetrics,),
        "verifier": (VerifierMetrics, DraftVersionMetrics, DraftHeadMetrics, LearningRecord),
        "drafter": (DrafterMetrics, DraftVersionMetrics, DraftHeadMetrics),
    }
    found = {service: CollectorRegistry() for service in parts}
    for service, registry in found.items():
        for metrics in parts[service]:
            metrics(registry)
    return found


def metrics_page() -> str:
    return _INTRODUCTION + "".join(_service(name, registry) for name, registry in registries().items())


def _service(service: str, registry: CollectorRegistry) -> str:
    rows = []
    # `_labelnames` has no public name; a family without samples does not show its labels.
    for collector in registry._collector_to_names:
        labels = ", ".join(code(label) for label in getattr(collector, "_labelnames", ()))
        for family in collector.describe() if hasattr(collector, "describe") else ():
            ending = "_total" if family.type == "counter" else ""
            rows.append([code(family.name + ending), family.type, labels, cell(family.documentation)])
    return f"\n## {service}\n\n" + table(("metric", "type", "labels", "what it counts"), rows)
