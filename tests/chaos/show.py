"""What a run has found, for people; every function returns what prints it and says whether all is well."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import FaultReport
from tests.chaos.load import Report
from tests.chaos.scaling import Phase

Told: TypeAlias = Callable[[Console], bool]


def storm(report: Report) -> Told:
    struck = ", ".join(f"{what} {count}" for what, count in sorted(report.misfortunes.items()))

    def tell(console: Console) -> bool:
        console.print(
            f"{report.num_requests} requests in {report.seconds:.0f} s, {report.num_reconnects} reconnects; "
            f"{sum(report.misfortunes.values())} misfortunes: {struck}"
        )
        console.print(
            f"longest pause of a stream: p50 {report.stall_s(0.5):.2f} s, p99 {report.stall_s(0.99):.2f} s, "
            f"most {max(report.stalls_s, default=0.0):.2f} s"
        )
        return _verdict(console, [report], report.leftovers)

    return tell


def scaling(phases: Sequence[Phase], leftovers: Sequence[str]) -> Told:
    def tell(console: Console) -> bool:
        table = Table(
            "drafters", "requests", "lost connections", "draft sessions, most", "p50 pause, s", "p99 pause, s"
        )
        for phase in phases:
            report = phase.report
            table.add_row(
                *(str(phase.num_drafters), str(report.num_requests), str(report.num_reconnects)),
                *(str(phase.most_draft_sessions), f"{report.stall_s(0.5):.2f}", f"{report.stall_s(0.99):.2f}"),
            )
        console.print(table)
        lost = sum(phase.report.num_reconnects for phase in phases)
        if lost:
            console.print(f"FAILED {lost} connections were lost", style="bold red")
        return _verdict(console, [phase.report for phase in phases], leftovers) and not lost

    return tell


def faults(found: Sequence[FaultReport], leftovers: Sequence[str] | None) -> Told:
    """leftovers: None where nobody has looked."""

    def tell(console: Console) -> bool:
        titles = (
            "what",
            "strikes",
            "requests",
            "lost connections",
            "p50 pause, s",
            "p99 pause, s",
            "longest, s",
            "mended, s",
        )
        table = Table(*titles)
        for one in found:
            report = one.report
            table.add_row(
                *(one.name, str(len(one.mend_s)), str(report.num_requests), str(report.num_reconnects)),
                *(f"{report.stall_s(0.5):.2f}", f"{report.stall_s(0.99):.2f}"),
                *(f"{max(report.stalls_s, default=0.0):.2f}", f"{statistics.median(one.mend_s):.1f}"),
            )
        console.print(table)
        return _verdict(console, [one.report for one in found], leftovers)

    return tell


def _verdict(console: Console, reports: Sequence[Report], leftovers: Sequence[str] | None) -> bool:
    wrong = [
        *(f"DIFFERENT BYTES {line}" for report in reports for line in report.mismatches),
        *(f"FAILED {line}" for report in reports for line in report.failures),
        *(f"LEFT BEHIND {line}" for line in leftovers or ()),
    ]
    for line in wrong:
        console.print(line, style="bold red", highlight=False, markup=False)
    if not wrong:
        num_requests = sum(report.num_requests for report in reports)
        console.print(f"{num_requests} requests: every stream's bytes equal the undisturbed run's")
        if leftovers is not None:
            console.print("no session, KV block or key without an end is left behind")
    return not wrong
