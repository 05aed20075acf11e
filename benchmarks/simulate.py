"""Simulates fleets that are larger or more distant than this machine: `python -m benchmarks.simulate`.

A discrete-event simulation: gateways, verifiers and drafters under the real rules (the draft policies, the verifier's
BatchGathering and StepCosts are the real classes), with costs and acceptance measured on the real stack
(`python -m benchmarks.simulation.record`). The same seed gives the same figures. docs/scaling.md describes what it
omits and how far it is from the real stack. Not here: GPUs, whose costs have not been measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.screen import console, table
from benchmarks.simulation.costs import DEFAULT_PATH, load_costs
from benchmarks.simulation.fleet import Arrivals, Outcome, Scenario, simulate
from benchmarks.simulation.session import Link
from outrider.shared.errors import ConfigError


def main(
    verifiers: Annotated[int, typer.Option(help="Verifiers.", min=1)] = 1,
    drafters_per_verifier: Annotated[str, typer.Option(help="Comma-separated; rounded up to whole drafters.")] = "1",
    rtt_ms: Annotated[str, typer.Option(help="Round-trip times between gateway and drafter, comma-separated.")] = "0",
    jitter: Annotated[float, typer.Option(help="Share by which each direction's delay may vary.", min=0, max=1)] = 0,
    method: Annotated[str, typer.Option(help="Of off, auto and fixed:N, comma-separated.")] = "off,auto",
    arrivals: Annotated[Arrivals, typer.Option(help="Arrival process of requests.")] = Arrivals.STREAMS,
    load: Annotated[str, typer.Option(help="Streams, or requests per second, per verifier; comma-separated.")] = "1,4",
    domain: Annotated[str, typer.Option(help="Acceptance of this domain in the cost file.")] = "code",
    tokens: Annotated[int, typer.Option(help="Tokens per request (mean, for random arrivals).")] = 96,
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft of auto.")] = 8,
    seconds: Annotated[float, typer.Option(help="Simulated seconds, after 5 s of warm-up.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    costs: Annotated[Path, typer.Option(help="Cost file.")] = DEFAULT_PATH,
    as_json: Annotated[bool, typer.Option("--json", help="One line per scenario instead of a table.")] = False,
) -> None:
    """Example: python -m benchmarks.simulate --verifiers 100 --drafters-per-verifier 0.25,1 --rtt-ms 0,5,20"""
    try:
        measured = load_costs(costs)
        scenarios = [
            Scenario(
                num_verifiers=verifiers,
                num_drafters=-int(-verifiers * float(ratio) // 1),
                method=one_method,
                load=float(one_load),
                arrivals=arrivals,
                link=Link(float(rtt) * 1e-3, jitter),
                domain=domain,
                num_tokens=tokens,
                max_draft_tokens=max_draft_tokens,
                seconds=seconds,
                seed=seed,
            )
            for one_load in load.split(",")
            for ratio in drafters_per_verifier.split(",")
            for rtt in rtt_ms.split(",")
            for one_method in method.split(",")
        ]
        rows = []
        for scenario in scenarios:
            rows.append((scenario, simulate(scenario, measured)))
            if as_json:
                print(json.dumps({**dataclasses.asdict(scenario), **dataclasses.asdict(rows[-1][1])}), flush=True)
    except (ConfigError, ValueError) as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    if not as_json:
        console.print(_table(rows))
        cpu_s, num_events = sum(outcome.cpu_s for _, outcome in rows), sum(outcome.num_events for _, outcome in rows)
        console.print(f"{num_events:,} events in {cpu_s:.1f} s; costs measured {measured.measured.get('time', '')}")


def _table(rows: list[tuple[Scenario, Outcome]]) -> Table:
    shown = table(
        *("method", "load", "drafters", "RTT", "tokens/s", "of off", "TTFT p50/p99", "per token p50/p99"),
        *("tokens/round", "drafted", "length", "verifier busy", "drafter busy", "timeouts"),
    )
    # Without drafts, number and distance of drafters do not matter.
    plain = {scenario.load: outcome.tokens_per_s for scenario, outcome in rows if scenario.method == "off"}
    for scenario, outcome in rows:
        base = plain.get(scenario.load)
        shown.add_row(
            scenario.method,
            f"{scenario.load:g}",
            str(scenario.num_drafters),
            f"{scenario.link.rtt_s * 1e3:g} ms",
            f"{outcome.tokens_per_s:,.1f}",
            f"{outcome.tokens_per_s / base:.2f}" if base else "",
            _milliseconds(outcome.first_token_s),
            _milliseconds(outcome.token_s),
            f"{outcome.tokens_per_round:.2f}",
            f"{outcome.drafted_share:.0%}",
            f"{outcome.draft_length:.1f}",
            f"{outcome.verifier_busy:.0%}",
            f"{outcome.drafter_busy:.0%}",
            str(outcome.num_timeouts),
        )
    return shown


def _milliseconds(found: dict[str, float]) -> str:
    return f"{found['p50'] * 1e3:.0f}/{found['p99'] * 1e3:.0f} ms" if found else ""


if __name__ == "__main__":
    typer.run(main)
