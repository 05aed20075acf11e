"""What a soak has found: tables for people, a row for benchmarks/results."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.run import Plan, SoakReport


def show(report: SoakReport, console: Console) -> None:
    table = Table("process", "what", "begin", "end", "a minute", "", title="second half of the run")
    for trend in report.trends:
        table.add_row(
            *(trend.process, trend.what, f"{trend.begin:.1f}", f"{trend.end:.1f}", f"{trend.per_min:+.3f}"),
            "" if trend.is_flat else "GROWS",
        )
    console.print(table)
    table = Table("seconds", "answers", "p50, s", "p99, s", title="latency of whole answers")
    for window in report.windows:
        when = f"{window.begin_s:.0f}-{window.end_s:.0f}"
        table.add_row(when, str(window.num_answers), f"{window.p50_s:.2f}", f"{window.p99_s:.2f}")
    console.print(table)
    counts = ", ".join(f"{kind} {count}" for kind, count in report.tally.counts.most_common())
    console.print(f"{report.tally.counts.total()} requests in {report.seconds:.0f} s: {counts}", highlight=False)
    console.print(f"p99 of the last third over the first's: {report.latency_ratio:.2f}", highlight=False)
    violations = report.violations()
    for line in violations:
        console.print(line, style="bold red", highlight=False, markup=False)
    if not violations:
        console.print(
            f"nothing grows; at {report.num_stops} stops no session and no KV block was held, at the end no key"
        )


def row(report: SoakReport, plan: Plan) -> dict[str, Any]:
    return {
        "plan": asdict(plan),
        "seconds": report.seconds,
        "num_requests": report.tally.counts.total(),
        "counts": dict(report.tally.counts),
        "trends": [asdict(trend) for trend in report.trends],
        "latency_windows": [asdict(window) for window in report.windows],
        "latency_ratio": report.latency_ratio,
        "num_stops": report.num_stops,
        "violations": report.violations(),
    }
