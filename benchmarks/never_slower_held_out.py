"""Is `auto` ever slower than not speculating, with traffic that its policy was not tuned on?

    python -m benchmarks.never_slower_held_out                                    (about 10 minutes on two quiet cores)
    python -m benchmarks.never_slower_held_out --cells ngram-16x4,turns-bad --rounds 4
    python -m benchmarks.never_slower_held_out --cells all

Held out: short and long answers, Poisson arrivals, two verifiers of unequal load and of two kinds, drafts that turn bad
in mid-run, greedy and sampled requests together, a remote drafter. Off, auto, off again and fixed lengths
take turns, back and forth, on the same requests, and all must give the same tokens; `off again` over `off` shows what
the measurement itself gets wrong. The scores: the share of cells in which `auto` keeps its promise, and how far it is
from the best fixed length. Rows go to benchmarks/results/never_slower_held_out.jsonl.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from benchmarks.prompts import mixed_prompts
from benchmarks.records import save_rows
from benchmarks.screen import console, say, table
from benchmarks.simulation.stack import expanded_target
from benchmarks.stack_cells.stacks import STACKS, running_stack
from benchmarks.stack_cells.traffic import (
    ClosedLoop,
    OpenLoop,
    Traffic,
    TwoVerifiers,
    code_then_unrepeated,
    greedy,
    greedy_and_sampled,
)
from benchmarks.turns import CONTROL, PROMISED, best_fixed, ratio, take_turns, variants
from outrider.client.stack.commands import StackState
from outrider.gateway.fleet.placement import LOAD_MARGIN


@dataclass(frozen=True)
class Cell:
    """stack: a key of STACKS. by_default: part of a run that names no cells. is_long: measured in half of the rounds;
    its runs take so long that fewer of them are as good.
    """

    name: str
    stack: str
    traffic: Traffic
    by_default: bool = True
    is_long: bool = False


def _answers(drafter: str, max_tokens: int, num_streams: int, prompts_per_stream: int, **options: bool) -> Cell:
    prompts = mixed_prompts(prompts_per_stream * num_streams)
    traffic = ClosedLoop(num_streams, max_tokens, greedy(prompts))
    return Cell(f"{drafter}-{max_tokens}x{num_streams}", drafter, traffic, **options)


def _cells() -> list[Cell]:
    """Cells of one stack stand together."""
    cells = []
    for drafter in ("ngram", "draft_model"):
        cells += [
            _answers(drafter, 16, 4, 5),
            _answers(drafter, 16, 16, 2),
            # The policy has been tuned on answers of 64 tokens.
            _answers(drafter, 64, 4, 2, by_default=False),
            _answers(drafter, 64, 16, 1, by_default=False),
            _answers(drafter, 400, 4, 1, is_long=True),
            _answers(drafter, 400, 16, 1, is_long=True, by_default=drafter == "ngram"),
        ]
        if drafter == "ngram":
            # n-grams gain much with copying and nothing with sampling, so a common length is wrong for half of them.
            cells.append(Cell("greedy-and-sampled", drafter, ClosedLoop(8, 48, greedy_and_sampled(mixed_prompts(16)))))
            cells.append(Cell("turns-bad", drafter, ClosedLoop(4, 48, code_then_unrepeated(6))))
    cells += [Cell(f"arrivals-{share:g}", "draft_model", OpenLoop(share, 32)) for share in (0.3, 0.7, 0.95)]
    # With more streams than LOAD_MARGIN on one verifier the gateway moves some to the other one when that has none.
    cells.append(Cell("unequal-load", "two alike", TwoVerifiers((1, LOAD_MARGIN), (3, 8), 32)))
    cells.append(Cell("two-kinds", "two kinds", TwoVerifiers((2, 2), (4, 4), 32)))
    cells.append(Cell("remote-5ms", "remote", ClosedLoop(4, 48, greedy(mixed_prompts(8)))))
    return cells


CELLS = {cell.name: cell for cell in _cells()}


@dataclass(frozen=True)
class Plan:
    lengths: tuple[int, ...]
    rounds: int
    learn_s: float


@dataclass(frozen=True)
class CellScore:
    """Ratios of one cell. best: the fixed length, or `off`, that was fastest."""

    auto_of_off: float
    control_of_off: float
    best: str
    auto_of_best: float


def main(
    models: Annotated[Path, typer.Option(help="Folder of the demo family.")] = Path("models"),
    cells: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(CELLS)}.")] = "",
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths to compare with, comma-separated.")] = "1,3,5",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; figures are medians over them.")] = 2,
    learn_s: Annotated[float, typer.Option(help="Seconds for which `auto` sees each load before it is measured.")] = 3,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/never_slower_held_out.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.never_slower_held_out --cells turns-bad --rounds 4 --no-save"""
    wanted = chosen(cells)
    plan = Plan(tuple(map(int, lengths.split(","))), rounds, learn_s)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, expanded_target(models / "demo-target", say) as target:
        for stack, group in groupby(wanted, key=lambda cell: cell.stack):
            say(f"{stack}: starting the stack")
            run_dir = Path(folder) / stack.replace(" ", "-")
            with running_stack(stack, target, models, run_dir, lambda _message: None) as state:
                for cell in group:
                    rows += _measure(cell, state, plan)
    _show(rows, time.monotonic() - started)
    if save:
        console.print(f"rows appended to {save_rows('never_slower_held_out', rows)}")


def chosen(names: str) -> list[Cell]:
    """Cells by comma-separated name, in the order of CELLS; "": those of a default run. Raises typer.BadParameter."""
    if names in ("", "all"):
        return [cell for cell in CELLS.values() if names or cell.by_default]
    wanted = set(names.split(","))
    unknown = wanted - CELLS.keys()
    if unknown:
        raise typer.BadParameter(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    return [cell for cell in CELLS.values() if cell.name in wanted]


def _measure(cell: Cell, state: StackState, plan: Plan) -> list[dict[str, Any]]:
    """A row per variant."""
    started = time.monotonic()
    drafts = variants(STACKS[cell.stack].method, plan.lengths)
    rounds = max(1, plan.rounds // 2) if cell.is_long else plan.rounds
    run = cell.traffic.prepare(state)
    run(drafts["off"], 0)  # fills the prefix cache
    learned_at = time.monotonic() + plan.learn_s
    run(drafts["auto"], 0)
    while time.monotonic() < learned_at:
        run(drafts["auto"], 0)
    scores = take_turns(list(drafts), rounds, lambda name, round_index: run(drafts[name], round_index))
    seconds = time.monotonic() - started
    say(f"{cell.name}: {seconds:.0f} s, auto / off {ratio(scores['auto'], scores['off']):.2f}")
    common = {"cell": cell.name, "stack": cell.stack, "cell_s": seconds}
    return [
        {**common, "variant": name, "score": median(found), "score_of_rounds": found} for name, found in scores.items()
    ]


def score_of(scores: dict[str, list[float]]) -> CellScore:
    """scores: of all rounds, by variant."""
    best = best_fixed(scores)
    return CellScore(
        ratio(scores["auto"], scores["off"]),
        ratio(scores[CONTROL], scores["off"]),
        best,
        ratio(scores["auto"], scores[best]),
    )


def summary(scores: list[CellScore]) -> str:
    """The benchmark's result in three lines: the promise, the distance from the best, the noise."""
    of_off, of_best, control = (
        [getattr(score, name) for score in scores] for name in ("auto_of_off", "auto_of_best", "control_of_off")
    )
    kept, control_kept = (sum(found >= PROMISED for found in ratios) for ratios in (of_off, control))
    return (
        f"auto / off: at least {PROMISED} in {kept} of {len(scores)} cells ({kept / len(scores):.0%}), "
        f"worst {min(of_off):.3f}\n"
        f"auto / best fixed: mean {fmean(of_best):.3f}, worst {min(of_best):.3f}\n"
        f"noise, {CONTROL} / off: at least {PROMISED} in {control_kept} of {len(scores)} cells, "
        f"from {min(control):.3f} to {max(control):.3f}"
    )


def _show(rows: list[dict[str, Any]], seconds: float) -> None:
    shown = table("cell", "rounds", "off", "auto", "auto / off", f"{CONTROL} / off", "best fixed", "auto / best", "s")
    results = []
    for name, group in groupby(rows, key=lambda row: row["cell"]):
        of_cell = list(group)
        scores = {row["variant"]: row["score_of_rounds"] for row in of_cell}
        result = score_of(scores)
        results.append(result)
        shown.add_row(
            *(name, str(len(scores["off"])), f"{median(scores['off']):.1f}", f"{median(scores['auto']):.1f}"),
            *(f"{result.auto_of_off:.2f}", f"{result.control_of_off:.2f}"),
            *(f"{result.best}: {median(scores[result.best]):.1f}", f"{result.auto_of_best:.2f}"),
            f"{of_cell[0]['cell_s']:.0f}",
        )
    console.print(shown)
    console.print(summary(results))
    console.print(f"{seconds:.0f} s in all; arrivals score 1 / seconds per token of a request, all others tokens/s")


if __name__ == "__main__":
    typer.run(main)
