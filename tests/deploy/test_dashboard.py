"""The Grafana dashboard against the code: every metric and label that it asks for is one that the services export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from outrider.drafter_service.metrics import DrafterMetrics
from outrider.gateway.metrics import GatewayMetrics
from outrider.shared.telemetry import model_labels
from outrider.verifier_service.metrics import VerifierMetrics

GRAFANA = Path(__file__).resolve().parents[2] / "deploy/grafana"
METRIC = re.compile(r'(outrider:[a-z0-9_]+)\{job="(\w+)"')
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# What Prometheus itself adds, and the bound of a histogram's bucket.
SCRAPE_LABELS = {"instance", "job", "le"}


def dashboard() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((GRAFANA / "dashboards/outrider.json").read_text())
    return tree


def targets() -> list[tuple[str, str]]:
    """(expression, legend) of every query."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]


def exported() -> dict[str, dict[str, set[str]]]:
    """Job -> name of a time series -> its labels, from the services' own metrics."""
    found: dict[str, dict[str, set[str]]] = {}
    for job, metrics in (("gateway", GatewayMetrics), ("verifier", VerifierMetrics), ("drafter", DrafterMetrics)):
        registry = CollectorRegistry()
        owner = metrics(registry)
        of_model = set(model_labels("m")) if job != "drafter" else set()
        labels = {
            item._name: {*item._labelnames, *of_model} for item in vars(owner).values() if hasattr(item, "_labelnames")
        }
        found[job] = {
            family.name + suffix: labels[family.name]
            for family in registry.collect()
            for suffix in _SUFFIXES[family.type]
        }
    return found


@pytest.fixture(scope="module")
def series() -> dict[str, dict[str, set[str]]]:
    return exported()


@pytest.mark.parametrize(("expression", "legend"), targets())
def test_query_asks_for_what_is_exported(expression: str, legend: str, series: dict[str, dict[str, set[str]]]) -> None:
    asked = METRIC.findall(expression)
    assert len(asked) == expression.count("outrider:") > 0, "every metric names its job"
    by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    matched = set(re.findall(r'(\w+)=~?"', expression))
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    for name, job in asked:
        assert name in series[job]
        assert (by | matched | shown) - SCRAPE_LABELS <= series[job][name]


@pytest.mark.parametrize(
    "metric",
    [
        "outrider:generation_tokens_total",
        "outrider:spec_decode_num_accepted_tokens_total",
        "outrider:spec_decode_num_draft_tokens_total",
        "outrider:spec_decode_num_drafts_total",
        "outrider:time_to_first_token_seconds_bucket",
        "outrider:inter_token_latency_seconds_bucket",
        "outrider:round_overhead_seconds_bucket",
        "outrider:step_queue_seconds_bucket",
        "outrider:draft_queue_seconds_bucket",
        "outrider:kv_cache_usage_perc",
        "outrider:num_requests_running",
        "outrider:verifier_failovers_total",
        "outrider:fleet_members",
        "outrider:num_preemptions_total",
        "outrider:sessions_waiting",
        "outrider:request_queue_time_seconds_sum",
        "outrider:request_prompt_tokens_bucket",
        "outrider:prefix_cache_hits_total",
        "outrider:round_seconds_sum",
        "outrider:round_tokens_total",
        "outrider:verify_rows_total",
        "outrider:draft_rounds_total",
    ],
)
def test_dashboard_shows(metric: str) -> None:
    assert any(metric + "{" in expression for expression, _ in targets())


@pytest.mark.parametrize("name", ["model_name", "instance"])
def test_every_query_follows_the_variable(name: str) -> None:
    [variable] = [one for one in dashboard()["templating"]["list"] if one["name"] == name]
    assert variable["includeAll"]
    assert variable["allValue"] == ".*"  # also series without the label, before a gateway knows its model
    for expression, _ in targets():
        selectors = [
            one for one in re.findall(r"\{([^{}]*)\}", expression) if 'job="drafter"' not in one or name == "instance"
        ]
        assert all(f'{name}=~"${name}"' in selector for selector in selectors), expression


def test_no_name_means_different_things_at_two_services(series: dict[str, dict[str, set[str]]]) -> None:
    """vLLM is one process: its dashboards sum over everything that has the name."""
    shared = [name for name in series["gateway"] if name in series["verifier"] or name in series["drafter"]]
    assert not shared


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_provisioning_fits_together() -> None:
    datasources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/outrider.yml").read_text())["providers"]
    compose = yaml.safe_load((GRAFANA.parents[1] / "docker-compose.yml").read_text())["services"]["grafana"]
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {datasources[0]["uid"]}
    assert f"./deploy/grafana/dashboards:{providers[0]['options']['path']}:ro" in compose["volumes"]
    assert "./deploy/grafana/provisioning:/etc/grafana/provisioning:ro" in compose["volumes"]
