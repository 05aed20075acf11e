"""vLLM's published Grafana dashboards on an Outrider stack with `--metrics-prefix vllm`: every query has data.

vllm_dashboards.json has the queries alone, by dashboard: of prometheus_grafana/ and dashboards/grafana/ below vLLM's
examples/observability/ (examples/online_serving/ before), of November 2026.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.load import Shape, run_load
from benchmarks.prompts import code_prompts
from docs.generate.prometheus import prometheus_server
from outrider.client.fleet import read_counts
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack
from tests.deploy.test_dashboard import SCRAPE_LABELS, exported
from tests.ports import server_port

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS: dict[str, list[str]] = json.loads((ROOT / "tests/deploy/vllm_dashboards.json").read_text())
QUERIES = [(dashboard, query) for dashboard, queries in DASHBOARDS.items() for query in queries]
METRIC = re.compile(r"vllm:(\w+)(?:\{([^}]*)\})?")
MODEL = "demo-target"
LOAD_S = 24
# As Grafana fills them in for a panel of the load's time; its least rate interval is four scrapes.
VARIABLES = {
    "$__rate_interval": "8s",
    "$__interval": "8s",
    "$__range": f"{LOAD_S}s",
    "$model_name": MODEL,
    "$Deployment_id": MODEL,
    "$job": "gateway",
    "$instance": ".*",
    "$engine": "0",
}


@pytest.mark.parametrize(("dashboard", "query"), QUERIES)
def test_a_query_asks_for_what_is_exported(dashboard: str, query: str) -> None:
    series = {name: labels for job in exported().values() for name, labels in job.items()}
    by = {label.strip() for group in re.findall(r"by ?\(([^)]*)\)", query) for label in group.split(",")}
    grouped: set[str] = set()
    for name, selector in METRIC.findall(query):
        labels = series[f"outrider:{name}"] | SCRAPE_LABELS
        assert set(re.findall(r"(\w+)=~?", selector)) <= labels, dashboard
        grouped |= labels
    assert by - {""} < grouped, dashboard


@dataclass
class Running:
    gateway: str
    prometheus: str
    load_ended: float


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus on PATH: Debian has it in the package of the same name")
    folder, verifier_port = tmp_path_factory.mktemp("stack"), server_port()
    settings = StackSettings(
        model=str(ROOT / "models" / MODEL),
        draft_model=str(ROOT / "models/demo-draft"),
        num_drafters=0,
        port=0,
        grpc_port=server_port(),
        verifier_args=("--metrics-port", str(verifier_port)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_METRICS_PREFIX", "vllm")
        stack = Stack(settings, folder / "run", lambda _message: None)
        state = stack.start()
    try:
        targets = {"gateway": state.url.removeprefix("http://"), "verifier": f"127.0.0.1:{verifier_port}"}
        with prometheus_server(folder, server_port(), targets) as url:
            asyncio.run(load(state.url))
            yield Running(state.url, url, time.time())
    finally:
        stack.stop()


async def load(url: str) -> None:
    """Completions with drafts, four at a time, some of whose prompts begin alike."""
    ends = time.monotonic() + LOAD_S
    while time.monotonic() < ends:
        await run_load(url, code_prompts(4), Shape(48, "draft_model", 4, temperature=0.7, seed=1), 4)


def found(running: Running, query: str) -> int:
    """Series with a number at the end of the load."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    params = {"query": query, "time": str(running.load_ended)}
    reply = httpx.get(f"{running.prometheus}/api/v1/query", params=params, timeout=60)
    assert reply.status_code == 200, reply.text
    return sum(one["value"][1] != "NaN" for one in reply.json()["data"]["result"])


@pytest.mark.storm
def test_every_query_has_data_under_load(running: Running) -> None:
    counts = {pair: found(running, pair[1]) for pair in QUERIES}
    for dashboard, queries in DASHBOARDS.items():
        num_found = sum(counts[dashboard, query] > 0 for query in queries)
        print(f"{dashboard}: {num_found} of {len(queries)} queries have data")
    assert not [pair for pair, num_series in counts.items() if not num_series]


@pytest.mark.storm
@pytest.mark.parametrize(
    ("label", "of", "value"),
    [
        ("model_name", '{__name__=~"vllm:.*"}', MODEL),
        ("model_name", "vllm:generation_tokens_total", MODEL),
        ("model_name", "vllm:request_success_total", MODEL),
        ("job", "vllm:num_requests_running", "gateway"),
        ("engine", "vllm:num_requests_running", "0"),
    ],
)
def test_a_variable_has_its_one_value(running: Running, label: str, of: str, value: str) -> None:
    params = {"match[]": of}
    reply = httpx.get(f"{running.prometheus}/api/v1/label/{label}/values", params=params, timeout=60)
    assert reply.json()["data"] == [value]


@pytest.mark.storm
def test_outrider_status_reads_that_prefix_too(running: Running) -> None:
    with httpx.Client(base_url=running.gateway) as client:
        counts = read_counts(client)
    assert min(counts.num_tokens, counts.num_requests, counts.num_draft_tokens, counts.num_accepted_tokens) > 0
