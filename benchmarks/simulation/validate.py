"""Compares the simulation with the real stack: `python -m benchmarks.simulation.validate` (about 10 minutes).

Costs are recorded first, on the same machine; then the real stack runs with 1, 2 and 3 drafters at several numbers of
streams, and the same is simulated: all services on one machine, whose cores they share. Both have run for a while
before they are measured, as what they learn takes longer than a measurement: whether forwards should gather the
sessions of several proposals, and what `auto` knows. Rows go to benchmarks/results/simulation.jsonl, the costs to the
file that benchmarks/simulate.py reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.load import LoadResult, Shape, run_for, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import save_rows
from benchmarks.screen import console, say, table
from benchmarks.simulation.costs import DEFAULT_PATH, Costs, save_costs
from benchmarks.simulation.fleet import Arrivals, Outcome, Scenario, simulate
from benchmarks.simulation.record import record
from benchmarks.simulation.stack import METHOD, MeasuredStack, expanded_target, measured_stack, plain

FIXED_LENGTH, MAX_DRAFT_TOKENS = 5, 8
_SIMULATED_S = 60.0


def main(
    target: Annotated[Path, typer.Option(help="Small target that is expanded.")] = Path("models/demo-target"),
    draft: Annotated[Path, typer.Option(help="Draft model.")] = Path("models/demo-draft"),
    drafters: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,3",
    streams: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8",
    prompts: Annotated[int, typer.Option(help="Per domain, when costs are recorded.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    repeats: Annotated[int, typer.Option(help="Rounds per kind of batch, when costs are recorded.")] = 20,
    rounds: Annotated[int, typer.Option(help="Repetitions of the real stack; medians are taken.")] = 1,
    learn_s: Annotated[float, typer.Option(help="Seconds under each load before the real stack is measured.")] = 8,
    costs_file: Annotated[Path, typer.Option(help="Where the costs go.")] = DEFAULT_PATH,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/simulation.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.simulation.validate --drafters 1 --streams 1,4 --no-save"""
    wanted_streams = [int(text) for text in streams.split(",")]
    rows: list[dict[str, Any]] = []
    with expanded_target(target, say) as expanded:
        costs = record(expanded, draft, num_prompts=prompts, max_tokens=max_tokens, repeats=repeats)
        save_costs(costs, costs_file)
        for num_drafters in [int(text) for text in drafters.split(",")]:
            with measured_stack(expanded, draft, say, num_drafters=num_drafters) as stack:
                for num_streams in wanted_streams:
                    say(f"{num_drafters} drafters, {num_streams} streams")
                    rows += _compare(stack, costs, num_drafters, num_streams, max_tokens, rounds, learn_s)
    _show(rows)
    if save:
        console.print(f"rows appended to {save_rows('simulation', rows)}")


def _compare(
    stack: MeasuredStack,
    costs: Costs,
    num_drafters: int,
    num_streams: int,
    max_tokens: int,
    rounds: int,
    learn_s: float,
) -> Iterator[dict[str, Any]]:
    prompts = code_prompts(max(4, 2 * num_streams))
    shapes = {
        "off": plain(max_tokens),
        f"fixed:{FIXED_LENGTH}": Shape(max_tokens, METHOD, FIXED_LENGTH),
        "auto": Shape(max_tokens, "auto", MAX_DRAFT_TOKENS),
    }
    results: dict[str, list[LoadResult]] = {method: [] for method in shapes}
    for shape in shapes.values():
        run_for(stack.state.url, prompts, shape, num_streams, learn_s)
    for _ in range(rounds):
        for method, shape in shapes.items():
            results[method].append(asyncio.run(run_load(stack.state.url, prompts, shape, num_streams)))
    for method in shapes:
        scenario = Scenario(
            num_verifiers=1,
            num_drafters=num_drafters,
            method=method,
            load=num_streams,
            arrivals=Arrivals.STREAMS,
            num_tokens=max_tokens,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            seconds=_SIMULATED_S,
            one_machine=True,
            cached_prompts=True,
        )
        yield _row(scenario, results[method], simulate(scenario, costs))


def _row(scenario: Scenario, real: list[LoadResult], simulated: Outcome) -> dict[str, Any]:
    requests = [request for result in real for request in result.requests]
    real_tokens_per_s = median(result.tokens_per_s for result in real)
    return {
        "num_drafters": scenario.num_drafters,
        "num_streams": int(scenario.load),
        "method": scenario.method,
        "real_tokens_per_s": real_tokens_per_s,
        "simulated_tokens_per_s": simulated.tokens_per_s,
        "ratio": simulated.tokens_per_s / real_tokens_per_s,
        "real_first_token_s": median(request.first_token_s for request in requests),
        "simulated_first_token_s": simulated.first_token_s["p50"],
    }


def _show(rows: list[dict[str, Any]]) -> None:
    shown = table("drafters", "streams", "method", "real tokens/s", "simulated", "simulated / real", "TTFT real / sim")
    for row in rows:
        shown.add_row(
            str(row["num_drafters"]),
            str(row["num_streams"]),
            row["method"],
            f"{row['real_tokens_per_s']:.1f}",
            f"{row['simulated_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['real_first_token_s'] * 1e3:.0f} / {row['simulated_first_token_s'] * 1e3:.0f} ms",
        )
    console.print(shown)


if __name__ == "__main__":
    typer.run(main)
