"""A run's rows as a Markdown table, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Row = dict[str, Any]
PLAIN = "off"
_HEADINGS = (
    "prompts", "T", "streams", "system", "variant", "tokens/s", "of its own plain", "of the best peer",
    "prompt tokens", "first token, p50", "tokens/s after it", "acceptance length", "same text as plain",
)  # fmt: skip


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields lines of Markdown. The best peer is the fastest variant of another system at the same load, if any."""
    yield f"| {' | '.join(_HEADINGS)} |"
    yield "|---" * len(_HEADINGS) + "|"
    for row in rows:
        peers = [
            other["tokens_per_s"] for other in rows if _load(other) == _load(row) and other["system"] != "outrider"
        ]
        length = row["acceptance_length"]
        cells = (
            _prompts(row),
            f"{row['temperature']:g}",
            f"{row['num_streams']}",
            row["system"],
            row["variant"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['of_plain']:.2f}",
            f"{row['tokens_per_s'] / max(peers):.2f}" if peers and row["system"] == "outrider" else "",
            f"{row['prompt_tokens']:.0f}",
            f"{row['ttft_s']['p50'] * 1e3:.0f} ms",
            f"{row['decode_tokens_per_s']:.0f}",
            "" if length is None else f"{length:.2f}",
            row["same_text_as_plain"],
        )
        yield f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s of the first kind of prompts at the lowest temperature: a group of bars per load, a bar per variant."""
    lowest = min(row["temperature"] for row in rows)
    rows = [row for row in rows if (_prompts(row), row["temperature"]) == (_prompts(rows[0]), lowest)]
    streams = sorted({row["num_streams"] for row in rows})
    names = list(dict.fromkeys((row["system"], row["variant"]) for row in rows))
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        rates = {row["num_streams"]: row["tokens_per_s"] for row in rows if (row["system"], row["variant"]) == name}
        left = [group - 0.4 + (place + 0.5) * width for group in range(len(streams))]
        axes.bar(left, [rates[count] for count in streams], width, label=f"{name[0]}, {name[1]}")
    axes.set_xticks(range(len(streams)), [str(count) for count in streams])
    axes.set_xlabel("streams")
    axes.set_ylabel("tokens/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    # The same picture gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _load(row: Row) -> tuple[str, float, int]:
    return _prompts(row), row["temperature"], row["num_streams"]


def _prompts(row: Row) -> str:
    return str(row.get("prompts", "questions"))  # older rows have no other
