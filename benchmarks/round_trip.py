"""The gain from a remote drafter, by round-trip time: `python -m benchmarks.round_trip` (about a quarter of an hour).

The real stack with a delaying link between gateway and drafter (benchmarks/simulation/link.py): round-trip times of 0
to 100 ms, with and without jitter, one stream, without drafts, with drafts of fixed lengths and with auto. Results are
compared with

    S = E / (1 + n c + r - h min(1, r))

E: tokens per round. n: draft tokens. c: seconds per draft token / T. r: round trip / T. T: seconds of a plain round. h:
share of rounds whose draft was requested while the verifier still worked on the previous one; those wait for the longer
of link and verifier. Drafting is not hidden, as all services share the cores here. (On separate machines h saves
min(1, n c + r).) Without h it is the formula of Leviathan et al. 2023 plus a round trip. All figures are from the same
run; S is given as it stands, and with the excess time of a round without delay. Also: bytes per token on the wire, and
time to first token. Conditions alternate, back and forth; figures are medians over rounds. Rows go to
benchmarks/results/round_trip.jsonl.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median, median_low
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import save_rows
from benchmarks.screen import console, say, table
from benchmarks.simulation.stack import (
    METHOD,
    MeasuredStack,
    expanded_target,
    growth,
    mean_of,
    measured_stack,
    plain,
)

_IDLE_S = 4.0
_FIRST_TOKEN_REPEATS = 3
_SERVICES = ("gateway", "verifier", "drafter")
_USED_AHEAD = 'drafts_asked_ahead_total{used="yes"}'


@dataclass(frozen=True)
class Plan:
    """conditions: (round-trip time in ms, jitter). lengths: of fixed drafts; the longest is auto's limit."""

    conditions: tuple[tuple[float, float], ...]
    lengths: tuple[int, ...]
    num_prompts: int
    max_tokens: int
    rounds: int = 1

    def variants(self) -> dict[str, Shape]:
        fixed = {f"draft {length}": Shape(self.max_tokens, METHOD, length) for length in self.lengths}
        return {"off": plain(self.max_tokens), **fixed, "auto": self.auto(self.max_tokens)}

    def auto(self, max_tokens: int) -> Shape:
        return Shape(max_tokens, "auto", max(self.lengths))


@dataclass(frozen=True)
class Cell:
    """One variant under one condition. Seconds and tokens of rounds exclude prefills."""

    rtt_ms: float
    jitter: float
    variant: str
    num_draft_tokens: int  # requested per round; 0: none, or auto
    tokens_per_s: float
    num_tokens: int
    rounds: int
    round_tokens: float
    round_s: float
    drafted_share: float
    # Share of rounds whose draft was requested in the previous round.
    ahead_share: float
    draft_s: float
    forward_s: float
    first_token_s: float
    # To and from each service, minus the traffic without requests.
    bytes_per_token: dict[str, float] = field(default_factory=dict)


def main(
    target: Annotated[Path, typer.Option(help="Small target to expand.")] = Path("models/demo-target"),
    draft: Annotated[Path, typer.Option(help="Draft model.")] = Path("models/demo-draft"),
    rtt_ms: Annotated[str, typer.Option(help="Round-trip times, comma-separated.")] = "0,1,5,20,100",
    jitter: Annotated[
        float, typer.Option(help="Each direction takes 1 - jitter to 1 + jitter times its delay; 0: none.")
    ] = 0.5,
    lengths: Annotated[str, typer.Option(help="Lengths of fixed drafts, comma-separated.")] = "2,5,8",
    prompts: Annotated[int, typer.Option(help="Prompts per cell.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; figures are medians over them.")] = 3,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/round_trip.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.round_trip --rtt-ms 0,20 --jitter 0 --prompts 2 --no-save"""
    times = [float(text) for text in rtt_ms.split(",")]
    conditions = [
        (time_ms, share) for time_ms in times for share in dict.fromkeys((0.0, jitter)) if time_ms or not share
    ]
    plan = Plan(tuple(conditions), tuple(int(text) for text in lengths.split(",")), prompts, max_tokens, rounds)
    with expanded_target(target, say) as expanded, measured_stack(expanded, draft, say, with_links=True) as stack:
        cells = _measure(stack, plan)
    rows = compare(cells)
    _show(rows)
    console.print(f"{len(os.sched_getaffinity(0))} cores; client, links and services run on the same cores")
    if save:
        console.print(f"rows appended to {save_rows('round_trip', rows)}")


def _measure(stack: MeasuredStack, plan: Plan) -> list[Cell]:
    url, prompts = stack.state.url, code_prompts(plan.num_prompts)
    for shape in (plain(16), Shape(48, METHOD, max(plan.lengths))):
        asyncio.run(run_load(url, prompts, shape, 1))  # fills the prefix cache, warms up
    idle = _idle_bytes_per_s(stack)
    found: dict[tuple[float, float, str], list[Cell]] = {}
    with Progress(console=console) as progress:
        num_cells = plan.rounds * len(plan.conditions) * (len(plan.variants()) + 1)
        task = progress.add_task("cells", total=num_cells)
        for round_index in range(plan.rounds):
            way = -1 if round_index % 2 else 1
            for rtt_ms, jitter in plan.conditions[::way]:
                stack.links["drafter"].set_delay(rtt_ms * 1e-3, jitter)
                # How long auto takes to adapt is a separate cell.
                wanted = {"auto, noticing": plan.auto(plan.max_tokens)} | dict([*plan.variants().items()][::way])
                for name, shape in wanted.items():
                    cell = _cell(stack, rtt_ms, jitter, name, shape, prompts, idle)
                    found.setdefault((rtt_ms, jitter, name), []).append(cell)
                    progress.advance(task)
                for name, first_token_s in _first_token_s(url, prompts, plan).items():
                    cells = found[rtt_ms, jitter, name]
                    cells[-1] = replace(cells[-1], first_token_s=first_token_s)
    names = ["auto, noticing", *plan.variants()]
    return [merged(found[rtt_ms, jitter, name]) for rtt_ms, jitter in plan.conditions for name in names]


def merged(cells: list[Cell]) -> Cell:
    """Medians over the rounds, figure by figure."""
    middle = {
        each.name: (median_low if each.type == "int" else median)(getattr(cell, each.name) for cell in cells)
        for each in fields(Cell)
        if each.name not in ("variant", "bytes_per_token")
    }
    per_token = {
        service: median(cell.bytes_per_token[service] for cell in cells) for service in cells[0].bytes_per_token
    }
    return replace(cells[0], **middle, bytes_per_token=per_token)


def _cell(
    stack: MeasuredStack,
    rtt_ms: float,
    jitter: float,
    name: str,
    shape: Shape,
    prompts: list[str],
    idle: dict[str, float],
) -> Cell:
    before = {service: stack.scrape(service) for service in _SERVICES}
    bytes_before = _num_bytes(stack)
    started = time.perf_counter()
    result = asyncio.run(run_load(stack.state.url, prompts, shape, 1))
    bytes_after, seconds = _num_bytes(stack), time.perf_counter() - started
    grown = {service: growth(before[service], stack.scrape(service)) for service in _SERVICES}
    kinds = {kind: _rounds(grown["gateway"], kind) for kind in ("on", "off")}
    rounds = sum(count for count, _, _ in kinds.values())
    num_tokens = sum(request.num_tokens for request in result.requests)
    return Cell(
        rtt_ms=rtt_ms,
        jitter=jitter,
        variant=name,
        num_draft_tokens=shape.num_speculative_tokens if shape.method == METHOD else 0,
        tokens_per_s=result.tokens_per_s,
        num_tokens=num_tokens,
        rounds=round(rounds),
        round_tokens=sum(tokens for _, tokens, _ in kinds.values()) / rounds,
        round_s=sum(spent for _, _, spent in kinds.values()) / rounds,
        drafted_share=kinds["on"][0] / rounds,
        ahead_share=grown["gateway"].get(_USED_AHEAD, 0.0) / rounds,
        draft_s=mean_of(grown["drafter"], "draft_seconds", f'{{method="{METHOD}"}}'),
        forward_s=mean_of(grown["verifier"], "forward_seconds"),
        first_token_s=_median_first_token(result),
        bytes_per_token={
            service: (bytes_after[service] - bytes_before[service] - seconds * idle[service]) / num_tokens
            for service in idle
        },
    )


def _rounds(grown: dict[str, float], kind: str) -> tuple[float, float, float]:
    """Count, tokens and seconds of rounds with ("on") or without ("off") a draft."""
    labels = f'{{speculation="{kind}"}}'
    names = ("round_seconds_count", "round_tokens_total", "round_seconds_sum")
    count, tokens, seconds = (grown.get(name + labels, 0.0) for name in names)
    return count, tokens, seconds


def _num_bytes(stack: MeasuredStack) -> dict[str, int]:
    return {service: sum(link.num_bytes) for service, link in stack.links.items()}


def _idle_bytes_per_s(stack: MeasuredStack) -> dict[str, float]:
    """Traffic without requests, such as health checks."""
    before, started = _num_bytes(stack), time.perf_counter()
    time.sleep(_IDLE_S)
    after, seconds = _num_bytes(stack), time.perf_counter() - started
    return {service: (after[service] - before[service]) / seconds for service in before}


def _first_token_s(url: str, prompts: list[str], plan: Plan) -> dict[str, float]:
    """Medians over short requests, alternating between the sides."""
    shapes = {"off": plain(4), "auto": plan.auto(4)}
    found: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(_FIRST_TOKEN_REPEATS):
        for name, shape in shapes.items():
            found[name].append(_median_first_token(asyncio.run(run_load(url, prompts, shape, 1))))
    return {name: median(values) for name, values in found.items()}


def _median_first_token(result: LoadResult) -> float:
    return median(request.first_token_s for request in result.requests)


def compare(cells: list[Cell]) -> list[dict[str, Any]]:
    """Rows of measured and expected figures, both as multiples of plain decoding.

    speedup: of rounds, without prefills. of_off: of whole requests, under the same condition. expected: the formula.
    expected_with_excess: plus the excess of an undelayed round of that length. Both are relative to one plain round,
    the median over all conditions, since the link does not affect it.
    """
    without_delay = {cell.variant: cell for cell in cells if cell.rtt_ms == 0.0}
    off_cells = {(cell.rtt_ms, cell.jitter): cell for cell in cells if cell.variant == "off"}
    plain_s = median(off.round_s / off.round_tokens for off in off_cells.values())
    rows = []
    for cell in cells:
        off = off_cells[cell.rtt_ms, cell.jitter]
        row = {**vars(cell), "of_off": cell.tokens_per_s / off.tokens_per_s}
        row["speedup"] = cell.round_tokens / cell.round_s * plain_s
        near = without_delay.get(cell.variant)
        if cell.num_draft_tokens and near is not None:
            row |= _expected(cell, near, plain_s)
        rows.append(row)
    return rows


def _expected(cell: Cell, near: Cell, plain_s: float) -> dict[str, float]:
    """near: the same variant without delay; E and h are the cell's own. plain_s: duration of a plain round."""
    drafting = near.draft_s / plain_s
    round_length = expected_round(drafting, cell.rtt_ms * 1e-3 / plain_s, cell.ahead_share)
    excess = near.round_s / plain_s - expected_round(drafting, 0.0, near.ahead_share)
    return {
        "c": drafting / cell.num_draft_tokens,
        "expected": cell.round_tokens / round_length,
        "expected_with_excess": cell.round_tokens / (round_length + excess),
    }


def expected_round(drafting: float, delay: float, ahead_share: float) -> float:
    """Duration of a round in plain rounds: the denominator of S."""
    return 1.0 + drafting + delay - ahead_share * min(1.0, delay)


def _show(rows: list[dict[str, Any]]) -> None:
    shown = table(
        *("RTT", "jitter", "variant", "tokens/s", "of off", "tokens/round", "drafted", "ahead"),
        *("speed-up", "expected", "with excess", "TTFT", "drafter B/token", "verifier B/token"),
        title="Real stack, one stream, the drafter behind a link with delay",
    )
    for row in rows:
        expected = [f"{row[name]:.2f}" if name in row else "" for name in ("expected", "expected_with_excess")]
        wire = [f"{row['bytes_per_token'][service]:.0f}" for service in ("drafter", "verifier")]
        shown.add_row(
            f"{row['rtt_ms']:g} ms",
            f"{row['jitter']:g}",
            row["variant"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['of_off']:.2f}",
            f"{row['round_tokens']:.2f}",
            f"{row['drafted_share']:.0%}",
            f"{row['ahead_share']:.0%}",
            f"{row['speedup']:.2f}",
            *expected,
            f"{row['first_token_s'] * 1e3:.0f} ms",
            *wire,
        )
    console.print(shown)


if __name__ == "__main__":
    typer.run(main)
