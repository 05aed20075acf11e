"""The pictures of docs/scaling.md. Not here: what is in them (sizing.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.simulation.sizing import NUM_VERIFIERS, Point

_SIZE = (7.0, 4.0)


def remote_drafting(found: dict[str, list[Point]], measured: list[dict[str, Any]], path: Path) -> None:
    """measured: rows of benchmarks/round_trip.py; those of auto without jitter are drawn as points."""
    figure, axes = _figure("round trip between gateway and drafter, ms", "tokens/s, of plain decoding")
    for name, points in found.items():
        style = "-" if name.startswith("auto") else "--"
        delays = [point.scenario.link.rtt_s * 1e3 for point in points]
        axes.plot(delays, [point.of_off for point in points], style, label=f"simulated: {name}")
    real = [row for row in measured if row["variant"] == "auto" and not row["jitter"]]
    if real:
        axes.plot(
            [row["rtt_ms"] for row in real], [row["of_off"] for row in real], "ko", label="real stack: auto, code"
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0.0)
    _save(figure, axes, path)


def shared_drafters(found: dict[str, list[Point]], path: Path) -> None:
    figure, axes = _figure("verifiers per drafter", "tokens/s, of plain decoding")
    for name, points in found.items():
        ratios = [NUM_VERIFIERS / point.scenario.num_drafters for point in points]
        axes.plot(ratios, [point.of_off for point in points], "o-", label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    _save(figure, axes, path)


def loads(found: dict[str, list[Point]], path: Path) -> None:
    figure, axes = _figure("requests a second per verifier", "first token, p99, seconds")
    for name, points in found.items():
        rates = [point.scenario.load for point in points]
        axes.plot(rates, [point.outcome.first_token_s.get("p99", 0.0) for point in points], "o-", label=name)
    axes.set_yscale("log")
    _save(figure, axes, path)


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend(fontsize="small")
    # The same picture gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
