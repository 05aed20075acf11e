"""The curves of a run, loss and tokens a round: as a line for the terminal, and as a picture.

The picture needs matplotlib, which only the `train` extra installs; the line needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
# characters; a curve in the terminal, so that both fit a line
_WIDTH = 24


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """One character per value, or per mean of neighbours where there are more than `width`."""
    if len(values) > width:
        bounds = [len(values) * place // width for place in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Both curves of a log's rows (train.jsonl), each with its newest value; "" while one has no value."""
    losses, rounds = _losses(rows), _rounds(rows)
    if not losses or not rounds:
        return ""
    loss, tokens = [value for _, value in losses], [value for _, value in rounds]
    return f"loss {sparkline(loss)} {loss[-1]:.3f}   tokens a round {sparkline(tokens)} {tokens[-1]:.2f}"


def write_picture(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG, or what the suffix says. Without pyplot, which would choose a window system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, name, points in zip(panels, ("loss", "tokens a round"), (_losses(rows), _rounds(rows)), strict=True):
        panel.plot([step for step, _ in points], [value for _, value in points], marker="." if len(points) < 30 else "")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step", fontsize=9)
        panel.grid(alpha=0.3)
    panels[1].set_ylim(bottom=1.0)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def _rounds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row["eval"]["tokens_per_round"]) for row in rows if "tokens_per_round" in row.get("eval", ())]
