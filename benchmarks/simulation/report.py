"""Fills docs/scaling.md with what was measured and simulated: `python -m benchmarks.simulation.report`.

Reads benchmarks/results/costs.json, and the newest run in simulation.jsonl and round_trip.jsonl, simulates what the
sizing rule stands on, writes docs/images/scaling-*.svg and the tables between `<!-- NAME -->` and `<!-- end -->`. A
table whose measurement is missing says so. Not here: the text, which is written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.records import RESULTS
from benchmarks.screen import console
from benchmarks.simulation import plots, sizing
from benchmarks.simulation.costs import DEFAULT_PATH, load_costs

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


def main(
    costs: Annotated[Path, typer.Option(help="File of costs.")] = DEFAULT_PATH,
    results: Annotated[Path, typer.Option(help="Folder of measured rows.")] = RESULTS,
    docs: Annotated[Path, typer.Option(help="Folder of scaling.md.")] = ROOT / "docs",
    seconds: Annotated[float, typer.Option(help="Simulated per point.")] = 30.0,
) -> None:
    """Example: python -m benchmarks.simulation.report --seconds 10"""
    measured = load_costs(costs)
    round_trips, validation = newest_run(results / "round_trip.jsonl"), newest_run(results / "simulation.jsonl")
    remote = sizing.remote_drafting(measured, seconds)
    shared = sizing.shared_drafters(measured, seconds)
    loads = sizing.loads(measured, seconds)
    fleets = sizing.fleets(measured, seconds)
    images = docs / "images"
    images.mkdir(exist_ok=True)
    plots.remote_drafting(remote, round_trips, images / "scaling-rtt.svg")
    plots.shared_drafters(shared, images / "scaling-drafters.svg")
    plots.loads(loads, images / "scaling-load.svg")
    tables = {
        "costs": sizing.costs_table(measured),
        "break-even": sizing.break_even_table(measured),
        "drafters": sizing.drafters_table(measured, shared),
        "load": sizing.load_table(loads),
        "fleets": sizing.fleets_table(fleets),
        "validation": validation_table(validation),
        "round-trip": round_trip_table(round_trips),
        "wire": wire_table(round_trips),
    }
    page = docs / "scaling.md"
    page.write_text(fill(page.read_text(), tables))
    console.print(f"{page} and {images}/scaling-*.svg written")


def newest_run(path: Path) -> list[Row]:
    """The rows that were appended together last; none where there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row for row in rows if row["time"] == rows[-1]["time"]]


def fill(text: str, tables: dict[str, list[list[str]]]) -> str:
    """Puts each table, a header row first, between its marks. Raises KeyError for a mark without a table."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{_markdown(tables[match[1]])}\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def _markdown(rows: list[list[str]]) -> str:
    if len(rows) < 2:
        return "Not measured yet."
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def validation_table(rows: list[Row]) -> list[list[str]]:
    header = ["drafters", "streams", "method", "real, tokens/s", "simulated", "simulated / real"]
    return [
        header,
        *(
            [
                str(row["num_drafters"]),
                str(row["num_streams"]),
                row["method"],
                f"{row['real_tokens_per_s']:.1f}",
                f"{row['simulated_tokens_per_s']:.1f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ),
    ]


def round_trip_table(rows: list[Row]) -> list[list[str]]:
    table = [
        [
            *("round trip", "jitter", "variant", "tokens/s", "of off", "ahead"),
            *("speed-up", "S", "S with excess", "off by"),
        ]
    ]
    for row in rows:
        expected = row.get("expected_with_excess")
        table.append(
            [
                f"{row['rtt_ms']:g} ms",
                f"± {row['jitter']:.0%}" if row["jitter"] else "",
                row["variant"],
                f"{row['tokens_per_s']:.1f}",
                f"{row['of_off']:.2f}",
                f"{row['ahead_share']:.0%}" if row.get("ahead_share") else "",
                f"{row['speedup']:.2f}",
                f"{row['expected']:.2f}" if expected else "",
                f"{expected:.2f}" if expected else "",
                f"{row['speedup'] / expected - 1:+.0%}" if expected else "",
            ]
        )
    return table


def wire_table(rows: list[Row]) -> list[list[str]]:
    near = [row for row in rows if row["rtt_ms"] == 0.0 and "noticing" not in row["variant"]]
    off_s = next((row["first_token_s"] for row in near if row["variant"] == "off"), 0.0)
    return [
        ["variant", "to and from the drafter, bytes/token", "to and from the verifier", "first token", "of off"],
        *(
            [
                row["variant"],
                f"{max(0.0, row['bytes_per_token']['drafter']):.0f}",
                f"{row['bytes_per_token']['verifier']:.0f}",
                f"{row['first_token_s'] * 1e3:.0f} ms",
                f"{row['first_token_s'] / off_s:.2f}",
            ]
            for row in near
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
