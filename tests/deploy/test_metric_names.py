"""What the dashboard and the autoscaling rules ask for is there, in the /metrics of services that have served."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack
from tests.deploy.kubernetes_objects import adapter_rules
from tests.deploy.test_compose import ROOT
from tests.deploy.test_dashboard import METRIC, targets
from tests.ports import server_port

pytestmark = pytest.mark.storm

DEMO_TARGET = str(ROOT / "models/demo-target")
# Its series are made by the first request that fails.
ONLY_AFTER_A_FAILURE = {"outrider:request_failure_total"}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Job -> names of the time series that it exports."""
    ports = {"verifier": server_port(), "drafter": server_port()}
    settings = StackSettings(
        model=DEMO_TARGET,
        draft_model="",
        methods=("ngram",),
        port=0,
        grpc_port=server_port(),
        verifier_args=("--metrics-port", str(ports["verifier"])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_METRICS_PORT", str(ports["drafter"]))  # a flag goes first: the verifier's stays
        stack = Stack(settings, tmp_path_factory.mktemp("stack"), lambda _message: None)
        state = stack.start()
    try:
        urls = {"gateway": state.url} | {job: f"http://127.0.0.1:{port}" for job, port in ports.items()}
        # Alike lines: n-grams are found, and some of their tokens accepted.
        prompt = "".join(f"x{number} = f(y{number})\n" for number in range(12))
        body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        for method in ("ngram", "off"):
            answer = httpx.post(
                f"{state.url}/v1/completions", json={**body, "speculation": {"method": method}}, timeout=120
            )
            assert answer.status_code == 200, answer.text
        yield {job: series_of(f"{url}/metrics") for job, url in urls.items()}
    finally:
        stack.stop()


def series_of(url: str) -> set[str]:
    families = text_string_to_metric_families(httpx.get(url, timeout=30).text)
    return {sample.name for family in families for sample in family.samples}


def test_the_dashboard_shows_what_is_exported(series: dict[str, set[str]]) -> None:
    asked = {pair for expression, _ in targets() for pair in METRIC.findall(expression)}
    assert len(asked) > 25
    assert {name for name, job in asked if name not in series[job]} <= ONLY_AFTER_A_FAILURE


def test_scaling_rules_ask_for_what_is_exported(series: dict[str, set[str]]) -> None:
    queries = [rule[key] for rule in adapter_rules() for key in ("seriesQuery", "metricsQuery")]
    asked = set(re.findall(r"outrider:[a-z0-9_]+", " ".join(queries)))
    pieces = {f"outrider:inter_token_latency_seconds_{part}" for part in ("bucket", "count")}
    assert asked & series["gateway"] == {"outrider:draft_rounds_total", *pieces}
    assert asked & series["verifier"] == {"outrider:step_queue_seconds_bucket"}
    assert asked & series["drafter"] == {"outrider:draft_queue_seconds_bucket"}
    assert asked <= series["gateway"] | series["verifier"] | series["drafter"]
