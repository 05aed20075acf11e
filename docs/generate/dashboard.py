"""A picture of the Grafana dashboard's panels: `python -m docs.generate.dashboard docs/images/dashboard.png`

Starts the demo stack and a real Prometheus (its binary has to be on PATH), runs requests of several kinds, asks
Prometheus for every panel's expressions as Grafana would, and draws them. It is not Grafana's
drawing: what it shows is that each panel has its data. About two minutes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import matplotlib
import typer

from benchmarks.load import Shape, run_load
from benchmarks.prompts import code_prompts
from docs.generate.prometheus import prometheus_server
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack, free_port

_DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/dashboards/outrider.json"
_RATE_INTERVAL = "8s"
_VARIABLE = re.compile(r"\$\w+")
_STEP_S = 2
_COLUMNS = 3


@dataclass(frozen=True)
class Ports:
    prometheus: int
    verifier: int
    drafter: int


def main(
    out: Annotated[Path, typer.Argument(help="The picture, .png or .svg.")],
    model: Annotated[str, typer.Option(help="The target.")] = "models/demo-target",
    draft_model: Annotated[str, typer.Option(help="The drafter's models.")] = "models/demo-draft,models/demo-eagle3",
    seconds: Annotated[int, typer.Option(help="How long requests run.")] = 80,
) -> None:
    """Example: python -m docs.generate.dashboard docs/images/dashboard.png"""
    ports = Ports(free_port(), free_port(), free_port())
    with tempfile.TemporaryDirectory() as folder:
        settings = StackSettings(
            model=model,
            draft_model=draft_model,
            port=free_port(),
            grpc_port=free_port(),
            verifier_args=("--metrics-port", str(ports.verifier)),
            drafter_args=("--metrics-port", str(ports.drafter)),
        )
        stack = Stack(settings, Path(folder) / "stack", lambda message: print(f"==> {message}", file=sys.stderr))
        state = stack.start()
        try:
            targets = {
                "gateway": state.url.removeprefix("http://"),
                "verifier": f"127.0.0.1:{ports.verifier}",
                "drafter": f"127.0.0.1:{ports.drafter}",
            }
            with prometheus_server(Path(folder), ports.prometheus, targets) as url:
                began = time.time()
                asyncio.run(_requests(state.url, seconds))
                panels = _panels(url, began, time.time())
        finally:
            stack.stop()
    _draw(panels, out)


async def _requests(url: str, seconds: int) -> None:
    """Several kinds of requests, in turn, at a load that goes up and down."""
    prompts = code_prompts(12)
    kinds = (("auto", 2), ("eagle3", 4), ("draft_model", 1), ("ngram", 3), ("off", 2))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for method, streams in kinds:
            await run_load(url, prompts[: 3 * streams], Shape(96, method, 5, temperature=0.7, seed=1), streams)


def _panels(url: str, began: float, ended: float) -> list[tuple[dict[str, Any], list[tuple[str, list[list[float]]]]]]:
    """Each panel that is drawn over time, with (label, [[time, value], ...]) of its series."""
    found = []
    for panel in json.loads(_DASHBOARD.read_text())["panels"]:
        if panel["type"] != "timeseries":
            continue
        series: list[tuple[str, list[list[float]]]] = []
        for target in panel["targets"]:
            query = _VARIABLE.sub(".*", target["expr"].replace("$__rate_interval", _RATE_INTERVAL))
            params: dict[str, Any] = {"query": query, "start": began, "end": ended, "step": _STEP_S}
            reply = httpx.get(f"{url}/api/v1/query_range", params=params)
            reply.raise_for_status()
            for result in reply.json()["data"]["result"]:
                points = [[float(at) - began, float(value)] for at, value in result["values"]]
                series.append((_label(target.get("legendFormat", ""), result["metric"]), points))
        found.append((panel, series))
    return found


def _label(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def _draw(panels: list[tuple[dict[str, Any], list[tuple[str, list[list[float]]]]]], out: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_rows = -(-len(panels) // _COLUMNS)
    figure, axes = pyplot.subplots(num_rows, _COLUMNS, figsize=(18, 3.1 * num_rows), constrained_layout=True)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (panel, series) in zip(axes.flat, panels, strict=False):
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
        axis.set_title(panel["title"] + (f" ({unit})" if unit in ("s", "percentunit") else ""), fontsize=10, loc="left")
        for label, points in series:
            axis.plot([at for at, _value in points], [value for _at, value in points], label=label, linewidth=1.4)
        if series:
            axis.legend(fontsize=7, loc="best")
            axis.set_ylim(bottom=0)
        else:
            axis.text(0.5, 0.5, "No data", ha="center", va="center", transform=axis.transAxes, color="0.5")
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    figure.savefig(out, dpi=80)
    print(f"{out}: {len(panels)} panels, {sum(not series for _panel, series in panels)} without data", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
