"""A stand-in for Kubernetes' autoscaler of drafters: the chart's own object, and the gauge that it names.

It reads a gateway's counters and computes what prometheus-adapter's rule for `outrider_draft_rounds_in_vain` does,
over the time between two looks instead of two minutes. It decides by the HorizontalPodAutoscaler's formula for a Value:
the replicas times value over target, rounded up; from none the ratio alone; up at once, down by one. Not here: the
pauses before scaling down, and the rule for the queue at drafters, who cannot be asked while there are none.
"""

from __future__ import annotations

import math
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

METRIC = "outrider_draft_rounds_in_vain"
_ROUNDS = "outrider:draft_rounds_total"


class Autoscaler:
    """scaler: a rendered HorizontalPodAutoscaler."""

    def __init__(self, scaler: dict[str, Any]) -> None:
        spec = scaler["spec"]
        targets = {entry["external"]["metric"]["name"]: entry["external"]["target"] for entry in spec["metrics"]}
        text = targets[METRIC]["value"]
        self._target = float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)
        self._least, self._most = spec["minReplicas"], spec["maxReplicas"]
        self._before: dict[str, float] = {}

    def look(self, num_replicas: int, metrics: str) -> int:
        """Returns how many there should be. metrics: the gateway's text. The first look has nothing to compare with."""
        counts = _counts(metrics)
        rounds = {came: count - self._before.get(came, count) for came, count in counts.items()}
        self._before = counts
        share = rounds["no"] / max(sum(rounds.values()), 1e-9)
        ratio = share / self._target
        wanted = math.ceil(ratio * num_replicas if num_replicas else ratio)
        return max(self._least, min(self._most, max(wanted, num_replicas - 1)))


def _counts(metrics: str) -> dict[str, float]:
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    return {sample.labels["draft"]: sample.value for sample in samples if sample.name == _ROUNDS}
