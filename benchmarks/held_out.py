"""Measures `auto` where nothing was tuned: `python -m benchmarks.held_out` (about 4 minutes of one core).

In simulated time (benchmarks/simulation/worlds/world.py): each cell runs without drafts, with every draft length in
turn, and with `auto`, all of them with the same requests. Scores are `auto` over no drafts and over the best of all
of these, per verifier. A rate is tokens a second of an open session: with a fixed number of streams that is
throughput; where requests arrive by chance, throughput is what arrives, and this is what their users see. Not here:
anything measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.records import save_rows
from benchmarks.screen import console, table
from benchmarks.simulation.costs import DEFAULT_PATH, Costs, load_costs
from benchmarks.simulation.worlds.cells import Cell, cells
from benchmarks.simulation.worlds.random_worlds import SETS, random_cells
from benchmarks.simulation.worlds.world import Served, run_world
from outrider.shared.errors import ConfigError

# share of plain decoding; what `auto` promises
_PROMISE = 0.97


@dataclass(frozen=True)
class Score:
    """One verifier's score in a cell. rates: tokens a second of an open session, by draft length, 0: without."""

    group: str
    name: str
    load: float
    rates: dict[int, float]
    auto: Served

    @property
    def best_length(self) -> int:
        return max(self.rates, key=lambda length: self.rates[length])

    @property
    def of_off(self) -> float:
        return self.auto.token_rate / self.rates[0]

    @property
    def of_best(self) -> float:
        return self.auto.token_rate / self.rates[self.best_length]


def main(
    only: Annotated[str, typer.Option("--cells", help="Groups or cells, comma-separated; all if empty.")] = "",
    seeds: Annotated[int, typer.Option(help="Random worlds in each of the two sets.", min=0)] = 80,
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths, comma-separated.")] = "1,2,3,5",
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft of auto.", min=1, max=16)] = 5,
    scale: Annotated[float, typer.Option(help="Of simulated time.", min=0.01)] = 1.0,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    costs: Annotated[Path, typer.Option(help="File of costs.")] = DEFAULT_PATH,
    save: Annotated[bool, typer.Option("--save", help="Append rows to benchmarks/results/held_out.jsonl.")] = False,
) -> None:
    """Example: python -m benchmarks.held_out --cells verifiers,random-a --seeds 20"""
    started = time.perf_counter()
    try:
        fixed = [0, *(int(length) for length in lengths.split(",") if length)]
        chosen = _choose(load_costs(costs), only, seeds, scale)
    except (ConfigError, ValueError) as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    chosen = [
        dataclasses.replace(c, world=dataclasses.replace(c.world, max_draft_tokens=max_draft_tokens)) for c in chosen
    ]
    scores = list(_run_all(chosen, fixed, workers))
    for group, members in itertools.groupby(scores, key=lambda score: score.group):
        console.print(_table(group, list(members)))
    console.print(_summary(scores))
    console.print(f"{len(scores)} scores in {time.perf_counter() - started:.0f} s")
    if save:
        console.print(f"rows appended to {save_rows('held_out', [_row(score) for score in scores])}")


def _choose(costs: Costs, only: str, seeds: int, scale: float) -> list[Cell]:
    found = cells(costs, scale)
    for group in SETS:
        found += random_cells(group, costs, seeds, scale)
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(name in (cell.group, cell.name) for cell in found):
            groups = ", ".join(dict.fromkeys(cell.group for cell in found))
            raise ConfigError(f"no cell or group {name!r}; groups are {groups}")
    return [cell for cell in found if not wanted or cell.group in wanted or cell.name in wanted]


def _run_all(chosen: Sequence[Cell], lengths: Sequence[int], workers: int) -> Iterator[Score]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("cells", total=len(chosen))
        for scores in _results(chosen, lengths, workers):
            progress.update(task, advance=1, description=scores[0].name)
            yield from scores


def _results(chosen: Sequence[Cell], lengths: Sequence[int], workers: int) -> Iterator[list[Score]]:
    if workers == 1:
        yield from (run_cell(cell, lengths) for cell in chosen)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_cell, chosen, itertools.repeat(lengths))


def run_cell(cell: Cell, lengths: Sequence[int]) -> list[Score]:
    """Returns the scores by verifier; lengths: 0 among them."""
    fixed = {length: run_world(cell.world, length) for length in lengths}
    auto = run_world(cell.world, None)
    several = len(auto) > 1
    return [
        Score(
            cell.group,
            f"{cell.name}/{place}" if several else cell.name,
            server.load,
            {length: served[place].token_rate for length, served in fixed.items()},
            auto[place],
        )
        for place, server in enumerate(cell.world.servers)
    ]


def _table(group: str, scores: Sequence[Score]) -> Table:
    lengths = list(scores[0].rates)
    names = ("cell", "load", *("off" if not length else str(length) for length in lengths), "auto", "of off", "of best")
    shown = table(*names, "drafted", "length", title=group)
    for score in scores:
        shown.add_row(
            score.name,
            f"{score.load:.3g}",
            *(f"{rate:.1f}" for rate in score.rates.values()),
            f"{score.auto.token_rate:.1f}",
            f"{score.of_off:.3f}",
            f"{score.of_best:.3f}",
            f"{score.auto.drafted_share:.0%}",
            f"{score.auto.draft_length:.1f}",
        )
    return shown


def _summary(scores: Sequence[Score]) -> Table:
    shown = table("group", "scores", f">= {_PROMISE} of off", "worst of off", "mean of best", "worst of best", "worst")
    groups = {
        group: [score for score in scores if score.group == group] for group in dict.fromkeys(s.group for s in scores)
    }
    for group, members in {**groups, "all": list(scores)}.items():
        if not members:
            continue
        worst = min(members, key=lambda score: score.of_best)
        shown.add_row(
            group,
            str(len(members)),
            f"{sum(score.of_off >= _PROMISE for score in members) / len(members):.1%}",
            f"{min(score.of_off for score in members):.3f}",
            f"{mean(score.of_best for score in members):.3f}",
            f"{worst.of_best:.3f}",
            worst.name,
        )
    return shown


def _row(score: Score) -> dict[str, object]:
    return {
        **dataclasses.asdict(score),
        "of_off": score.of_off,
        "of_best": score.of_best,
        "best_length": score.best_length,
    }


if __name__ == "__main__":
    typer.run(main)
