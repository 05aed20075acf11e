"""`python -m tests.soak --minutes 30`: exit code 1 when something grows, is held, or an answer is wrong."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.records import save_rows
from tests.soak.fleet import SoakFleet
from tests.soak.load import Tally
from tests.soak.run import Plan, SoakReport, run_soak
from tests.soak.show import row, show

_console = Console(width=120)


def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="Of load.")] = 30.0,
    at_once: Annotated[int, typer.Option(min=1, help="Clients, each with one request at a time.")] = 16,
    drafters: Annotated[int, typer.Option(min=0)] = 2,
    deadline_s: Annotated[float, typer.Option(min=1, help="Seconds after which a request counts as hung.")] = 120.0,
    session_ttl_s: Annotated[int, typer.Option(min=1, help="Seconds that Redis keeps what has ended.")] = 60,
    seed: Annotated[int, typer.Option(help="Of what is asked for.")] = 0,
    save: Annotated[bool, typer.Option(help="Append a row to benchmarks/results/soak.jsonl.")] = True,
) -> None:
    """Example: python -m tests.soak --minutes 5 --no-save"""
    seconds = 60 * minutes
    plan = Plan(
        seconds,
        at_once,
        sample_s=min(10.0, seconds / 30),
        idle_s=max(20.0, seconds / 10),
        warm_up_s=min(120.0, seconds / 5),
        deadline_s=deadline_s,
        seed=seed,
    )
    report = asyncio.run(_soak(plan, drafters, session_ttl_s))
    show(report, _console)
    if save:
        _console.print(f"row appended to {save_rows('soak', [row(report, plan)])}", highlight=False)
    sys.exit(1 if report.violations() else 0)


async def _soak(plan: Plan, num_drafters: int, session_ttl_s: int) -> SoakReport:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Progress(*columns, console=_console) as progress,
    ):
        task = progress.add_task("starting", total=plan.seconds)

        def tell(seconds: float, tally: Tally) -> None:
            description = f"{tally.counts.total()} requests, {len(tally.failures)} wrong"
            progress.update(task, description=description, completed=seconds)
            if not _console.is_terminal:
                _console.print(f"{seconds:.0f} s: {description}", highlight=False)

        async with SoakFleet(Path(folder), num_drafters=num_drafters, session_ttl_s=session_ttl_s) as fleet:
            return await run_soak(fleet, plan, tell)


if __name__ == "__main__":
    typer.run(main)
