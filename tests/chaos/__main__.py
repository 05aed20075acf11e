"""`python -m tests.chaos --requests 1000`: exit code 1 when a byte differs, a request fails or something is left."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.chaos.fleet import Fleet
from tests.chaos.run import Load, Report, run_chaos

_console = Console()


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the storm.")] = 1000,
    at_once: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 96,
    pause: Annotated[float, typer.Option(help="Mean seconds between two misfortunes.")] = 2.0,
    gateways: Annotated[int, typer.Option(min=2)] = 2,
    drafters: Annotated[int, typer.Option(min=1)] = 3,
    verifiers: Annotated[int, typer.Option(min=2)] = 2,
    seed: Annotated[int, typer.Option(help="Of the storm and of what is asked for.")] = 0,
) -> None:
    """Example: python -m tests.chaos --requests 200 --pause 1"""
    load = Load(requests, at_once, tokens, pause, seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = asyncio.run(_run(Path(folder), load, gateways, drafters, verifiers))
    show(report)
    sys.exit(1 if report.mismatches or report.failures or report.leftovers else 0)


async def _run(folder: Path, load: Load, gateways: int, drafters: int, verifiers: int) -> Report:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    _console.print(f"==> starting {gateways} gateways, {drafters} drafters, {verifiers} verifiers and Redis")
    fleet = Fleet(folder, num_gateways=gateways, num_drafters=drafters, num_verifiers=verifiers)
    with Progress(*columns, console=_console) as progress:
        task = progress.add_task("", total=load.num_requests)
        async with fleet:
            return await run_chaos(fleet, load, lambda count: progress.advance(task, count))


def show(report: Report) -> None:
    struck = ", ".join(f"{what} {count}" for what, count in sorted(report.misfortunes.items()))
    _console.print(
        f"{report.num_requests} requests in {report.seconds:.0f} s, {report.num_reconnects} reconnects; "
        f"{sum(report.misfortunes.values())} misfortunes: {struck}"
    )
    _console.print(
        f"longest pause of a stream: p50 {report.stall_s(0.5):.2f} s, p99 {report.stall_s(0.99):.2f} s, "
        f"most {max(report.stalls_s, default=0.0):.2f} s"
    )
    for title, lines in (
        ("DIFFERENT BYTES", report.mismatches),
        ("FAILED", report.failures),
        ("LEFT BEHIND", report.leftovers),
    ):
        for line in lines:
            _console.print(f"{title} {line}", style="bold red", highlight=False)
    if not (report.mismatches or report.failures or report.leftovers):
        _console.print("every stream's bytes equal the undisturbed run's; nothing is left behind")


if __name__ == "__main__":
    typer.run(main)
