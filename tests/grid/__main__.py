"""`python -m tests.grid`: as much of the grid as there is time for, with every mismatch named."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.grid.cells import Cell, all_cells, covering_sample, groups, random_sample
from tests.grid.grid import Grid, Report
from tests.grid.models import MODEL_NAMES, grid_model

_console = Console()


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(MODEL_NAMES)}; all if absent.")] = None,
    sample: Annotated[
        int, typer.Option(help="This many random cells a model; 0: a sample that covers every pair.")
    ] = 0,
    full: Annotated[bool, typer.Option("--full", help="Every cell: hours.")] = False,
    drafter: Annotated[list[str] | None, typer.Option(help="With --full: only these, off_free and ngram, say.")] = None,
    shape: Annotated[str, typer.Option(help="With --full: chain or tree; both if empty.")] = "",
    shard: Annotated[str, typer.Option(help="With --full: part of all, 2/8 is the second of eight.")] = "1/1",
    seed: Annotated[int, typer.Option(help="Of the sample, the crowds and the random drafts.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of a forward pass; 0: every core.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda: target, draft model and heads.")] = "cpu",
) -> None:
    """The same output whoever drafts. Exit code 1 when one cell differs."""
    names = model or list(MODEL_NAMES)
    for name in names:
        if name not in MODEL_NAMES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(MODEL_NAMES)}")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(names):
            if full:
                cells = _part(all_cells(), drafter or (), shape, shard)
            else:
                cells = random_sample(seed + index, sample) if sample else covering_sample(seed + index)
            started = time.perf_counter()
            grid = Grid(
                grid_model(name, Path(folder)),
                seed=seed,
                num_threads=threads or len(os.sched_getaffinity(0)),
                device=device,
            )
            report = _run(name, grid, cells, seed)
            _show(name, report, time.perf_counter() - started)
            failed = failed or bool(report.mismatches)
    sys.exit(1 if failed else 0)


def _part(cells: list[Cell], drafters: Sequence[str], shape: str, shard: str) -> list[Cell]:
    chosen = [
        cell
        for cell in cells
        if (not drafters or cell.drafter in drafters) and (not shape or cell.shape in (shape, "none"))
    ]
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise typer.BadParameter(f"--shard {shard}: must be like 2/8")
    return chosen[int(index) - 1 :: int(count)]


def _run(name: str, grid: Grid, cells: Sequence[Cell], seed: int) -> Report:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=_console) as progress:
            task = progress.add_task("", total=sum(len(group) for group in groups(cells, seed)))
            return grid.run(cells, lambda count: progress.advance(task, count))
    finally:
        grid.close()


def _show(name: str, report: Report, seconds: float) -> None:
    table = Table("drafter", "cells", "mismatches", "drafted", "accepted", title=f"{name}, {seconds:.0f} s")
    by_drafter = sorted(report.outcomes, key=lambda outcome: outcome.cell.drafter)
    for drafter, grouped in itertools.groupby(by_drafter, key=lambda outcome: outcome.cell.drafter):
        outcomes = list(grouped)
        drafted = sum(outcome.num_draft_tokens for outcome in outcomes)
        accepted = sum(outcome.num_accepted_tokens for outcome in outcomes)
        wrong = sum(not outcome.agrees for outcome in outcomes)
        table.add_row(drafter, *(str(count) for count in (len(outcomes), wrong, drafted, accepted)))
    _console.print(table)
    for parameters, digest in report.digests.items():
        _console.print(f"  {parameters:18}{digest}", highlight=False)
    digests = {(outcome.cell.parameters, outcome.digest) for outcome in report.outcomes}
    _console.print(
        f"  {len(report.outcomes)} cells, {len(digests)} hashes for {len(report.digests)} requests, "
        f"{report.num_preemptions} preemptions"
    )
    for outcome in report.mismatches:
        _console.print(f"  MISMATCH {outcome}", style="bold red", highlight=False)


if __name__ == "__main__":
    typer.run(main)
