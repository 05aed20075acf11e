"""plots.md and its pictures: the newest row of each variant in benchmarks/results/, as bars. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
Row = Mapping[str, Any]
_LEFT, _BAR, _STEP, _WIDTH = 230, 18, 28, 720
_STYLE = """<style>
    text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2b35; }
    .bar { fill: #0b6e8f; } .plain { fill: #8fa3b0; } line { stroke: #5a6b78; stroke-dasharray: 3 3; }
    @media (prefers-color-scheme: dark) {
      text { fill: #dfe7ec; } .bar { fill: #4aa3c4; } .plain { fill: #667884; } line { stroke: #a5b4bf; }
    }
  </style>"""
_INTRODUCTION = """# Plots

Tokens per second, end to end, one picture per question: the newest row of each variant in `benchmarks/results/`, of
chat on real weights the newest run, drawn when this site is built. Grey bars are plain decoding, and a dashed line is
its rate. What was measured, and how: [Benchmarks](benchmarks.md).
"""


def pictures() -> Mapping[str, tuple[str, str]]:
    """Path on the site -> (title, SVG)."""
    found = {}
    serving = _newest("serving", lambda row: (row["system"], row["variant"], row["num_streams"]))
    for num_streams, sampled in sorted({(row["num_streams"], _is_sampled(row)) for row in serving}):
        rows = [row for row in serving if (row["num_streams"], _is_sampled(row)) == (num_streams, sampled)]
        title = f"The whole stack at temperature {sampled:d}, {num_streams} stream{'s' if num_streams > 1 else ''}"
        found[f"images/plots/serving-{num_streams}-{sampled:d}.svg"] = title, _bars(title, rows)
    methods = _newest("methods", lambda row: (row["variant"], row["temperature"]))
    for temperature in sorted({row["temperature"] for row in methods}):
        rows = [row for row in methods if row["temperature"] == temperature]
        title = f"Drafters at temperature {temperature:g}, one stream"
        found[f"images/plots/methods-{temperature:g}.svg"] = title, _bars(title, rows)
    chat = _rows("real_chat")
    chat = [row for row in chat if row["time"] == chat[-1]["time"]]
    for load in sorted({_chat_load(row) for row in chat}):
        rows = [row for row in chat if _chat_load(row) == load]
        prompts, temperature, num_streams = load
        streams = f"{num_streams} stream{'s' if num_streams > 1 else ''}"
        title = f"Chat on {rows[0]['model']}, {prompts}, temperature {temperature:g}, {streams}"
        found[f"images/plots/real-chat-{prompts}-{num_streams}-{temperature:g}.svg"] = title, _bars(title, rows)
    return found


def plots_page() -> str:
    return _INTRODUCTION + "".join(
        f"\n## {title}\n\n![Bars: {title}, tokens per second of each variant]({path})\n"
        for path, (title, _) in pictures().items()
    )


def _chat_load(row: Row) -> tuple[str, float, int]:
    return row.get("prompts", "questions"), row["temperature"], row["num_streams"]


def _is_sampled(row: Row) -> bool:
    return "T=1" in row["variant"]


def _newest(name: str, key: Callable[[Row], Any]) -> Iterable[Row]:
    """The last row of each key, in the order of the file."""
    rows: dict[Any, Row] = {}
    for row in _rows(name):
        rows.pop(key(row), None)
        rows[key(row)] = row
    return rows.values()


def _rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _bars(title: str, rows: Iterable[Row]) -> str:
    ordered = sorted(rows, key=lambda row: (row.get("system", "outrider"), -float(row["tokens_per_s"])))
    largest = max(float(row["tokens_per_s"]) for row in ordered)
    scale = (_WIDTH - _LEFT - 70) / largest
    height = _STEP * len(ordered) + 12
    parts = []
    for place, row in enumerate(ordered):
        y, rate = 8 + place * _STEP, float(row["tokens_per_s"])
        name = row["variant"] if row.get("system", "outrider") == "outrider" else f"{row['system']} {row['variant']}"
        kind = "plain" if row["variant"].split(",")[0] in ("off", "plain") else "bar"
        parts.append(f'  <text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'  <rect class="{kind}" x="{_LEFT}" y="{y}" width="{rate * scale:.1f}" height="{_BAR}" rx="2"/>')
        parts.append(f'  <text x="{_LEFT + rate * scale + 8:.1f}" y="{y + 14}">{rate:.1f}</text>')
        if row["variant"] == "off":
            x = f"{_LEFT + rate * scale:.1f}"
            parts.append(f'  <line x1="{x}" y1="0" x2="{x}" y2="{height}"/>')
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n  <title>{escape(title)}</title>\n  {_STYLE}\n'
    return head + "\n".join(parts) + "\n</svg>\n"
