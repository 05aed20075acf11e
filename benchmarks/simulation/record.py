"""Measures what benchmarks/simulate.py is fed with: `python -m benchmarks.simulation.record`.

On the real services, over gRPC: seconds of a forward by its rows and of a proposal by its length and the sessions in it
(the Timings that services send), what lies between services (/metrics of the gateway), and, through REST, how many
draft tokens are accepted round by round. The target is the demo target expanded to real cost. Writes
benchmarks/results/costs.json. On a busy machine it measures the others' load as well.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import random
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import httpx
import typer

from benchmarks.load import Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import provenance
from benchmarks.screen import console, say
from benchmarks.simulation.costs import DEFAULT_PATH, Costs, Domain, save_costs
from benchmarks.simulation.probes import DraftProbe, Forward, Sample, VerifyProbe
from benchmarks.simulation.stack import (
    METHOD,
    MeasuredStack,
    expanded_target,
    growth,
    mean_of,
    measured_stack,
    plain,
)
from outrider.verifier_service.timing.step_costs import StepCosts

# Rows of forwards of one session: points of the table.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# (sessions, draft tokens of each): what further sessions add to the rows of one.
_BATCHES = ((4, 0), (8, 0), (16, 0), (4, 3), (8, 3), (16, 3))
# The share by which a batch may be larger or smaller to count for a point.
_NEAR = 0.15
_FEWEST_SAMPLES = 3
_PREFILL_ROWS = 256
_DRAFT_SESSIONS = (1, 2, 4, 8, 16)
_DRAFT_CATCH_UP_ROWS = 60
# Of the rounds through the gateway.
_ROUND_DRAFT_TOKENS = 4
_BLOCK_SIZE = 16
MAX_DRAFT_TOKENS = 8


def main(
    target: Annotated[Path, typer.Option(help="Small target that is expanded.")] = Path("models/demo-target"),
    draft: Annotated[Path, typer.Option(help="Draft model.")] = Path("models/demo-draft"),
    prompts: Annotated[int, typer.Option(help="Prompts per domain.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    repeats: Annotated[int, typer.Option(help="Rounds per kind of batch; medians are taken.")] = 20,
    out: Annotated[Path, typer.Option(help="File that is written.")] = DEFAULT_PATH,
) -> None:
    """Example: python -m benchmarks.simulation.record --repeats 40"""
    with expanded_target(target, say) as expanded:
        costs = record(expanded, draft, num_prompts=prompts, max_tokens=max_tokens, repeats=repeats)
    save_costs(costs, out)
    console.print_json(data={name: value for name, value in vars(costs).items() if name not in ("domains", "measured")})
    for name, domain in costs.domains.items():
        figures = ", ".join(f"{length}: {domain.tokens_per_round(length):.2f}" for length in (1, 2, 4, 8))
        console.print(f"{name}: tokens per round by draft length {figures}")
    console.print(f"written to {out}")


def record(target: Path, draft: Path, *, num_prompts: int, max_tokens: int, repeats: int) -> Costs:
    """Records a stack of its own with one drafter, never asked ahead: its services take turns, so that what each
    takes in a round is told apart. Raises what the services raise."""
    with measured_stack(target, draft, say, gateway_args=("--draft-ahead", "false")) as stack:
        return _record(stack, num_prompts, max_tokens, repeats)


def _record(stack: MeasuredStack, num_prompts: int, max_tokens: int, repeats: int) -> Costs:
    say("forwards of the target, proposals of the draft model")
    verify = asyncio.run(_measure_verifier(stack.state.verifiers[0], repeats))
    drafts = asyncio.run(_measure_drafter(stack.state.drafters[0], repeats))
    say("requests through the gateway")
    cached_rows = _BLOCK_SIZE // 2
    gap_s = verify["step_gap_s"] + verify["step_gap_per_session_s"]
    trips = _measure_gateway(stack, num_prompts, max_tokens)
    forward_s = StepCosts(verify["verifier_step"]).seconds
    propose_s = drafts["draft_fixed_s"] + _ROUND_DRAFT_TOKENS * StepCosts(drafts["draft_step"]).seconds(1)
    prefill_s = forward_s(cached_rows)
    return Costs(
        **verify,
        **drafts,
        verifier_beside_drafter=max(1.0, trips["round_forward_s"] / forward_s(1 + _ROUND_DRAFT_TOKENS)),
        drafter_beside_verifier=max(1.0, trips["round_draft_s"] / propose_s),
        host_round_s=trips["host_round_s"],
        host_draft_s=trips["host_draft_s"],
        drafter_trip_s=max(0.0, trips["round_overhead_s"] - verify["verifier_trip_s"] - gap_s),
        request_s=max(0.0, trips["first_token_s"] - prefill_s - gap_s - verify["verifier_trip_s"]),
        cached_prompt_rows=cached_rows,
        domains=asyncio.run(_record_acceptance(stack.state.url, num_prompts, max_tokens)),
        measured={**provenance(), "repeats": repeats, "prompts_per_domain": num_prompts, "max_tokens": max_tokens},
    )


async def _measure_verifier(address: str, repeats: int) -> dict[str, Any]:
    async with VerifyProbe(address) as probe:
        of_one = [forward for rows in _ROWS for forward in await probe.forwards(1, rows - 1, repeats)]
        of_many = [forward for batch in _BATCHES for forward in await probe.forwards(*batch, repeats)]
        step = medians_near([(forward.num_rows, forward.seconds) for forward in of_one], _ROWS)
        prefill_s = median(await probe.prefills(_PREFILL_ROWS, max(3, repeats // 5)))
        gaps = [gap for sessions in (1, 16) for gap in await probe.gaps(sessions, repeats)]
        per_session_s, one_s = _slope(gaps)
        return {
            "verifier_step": (*step, (_PREFILL_ROWS, prefill_s)),
            "verifier_session_s": per_session_s_of(of_many, StepCosts(step)),
            "step_gap_s": max(0.0, one_s - per_session_s),
            "step_gap_per_session_s": per_session_s,
            "verifier_trip_s": median(await probe.trips(repeats)),
        }


async def _measure_drafter(address: str, repeats: int) -> dict[str, Any]:
    """T(sessions, length) = fixed + length x step(sessions)."""
    async with DraftProbe(address, METHOD) as probe:
        found: dict[int, dict[int, float]] = {}
        for length in (1, MAX_DRAFT_TOKENS):
            samples = [sample for count in _DRAFT_SESSIONS for sample in await probe.proposals(count, length, repeats)]
            found[length] = dict(medians_near(samples, _DRAFT_SESSIONS))
        short, long = found[1], found[MAX_DRAFT_TOKENS]
        steps = [(count, (long[count] - short[count]) / (MAX_DRAFT_TOKENS - 1)) for count in short if count in long]
        fixed_s = max(0.0, short[1] - steps[0][1])
        catch_up_s = median(await probe.first_proposals(_DRAFT_CATCH_UP_ROWS, max(3, repeats // 5)))
        return {
            "draft_step": (*steps, (_DRAFT_CATCH_UP_ROWS, max(steps[-1][1], catch_up_s - fixed_s))),
            "draft_fixed_s": fixed_s,
        }


def medians_near(samples: Iterable[Sample], points: Sequence[int]) -> list[Sample]:
    """Returns the medians of samples about each point; one that was met too seldom is left out, but for the first."""
    table = []
    for point in points:
        near = [seconds for size, seconds in samples if abs(size - point) <= _NEAR * point]
        if len(near) >= _FEWEST_SAMPLES or point == points[0]:
            table.append((point, median(near)))
    return table


def per_session_s_of(forwards: Iterable[Forward], step: StepCosts) -> float:
    """Seconds that each session beyond the first adds to a forward, by its rows; forwards of one tell nothing."""
    more = [
        (each.seconds - step.seconds(each.num_rows)) / (each.num_sessions - 1)
        for each in forwards
        if each.num_sessions > 1
    ]
    return max(0.0, median(more or [0.0]))


def _slope(gaps: Sequence[Sample]) -> tuple[float, float]:
    """Seconds per session beyond the first, and with one."""
    one_s = median(seconds for sessions, seconds in gaps if sessions == 1)
    more = [(seconds - one_s) / (sessions - 1) for sessions, seconds in gaps if sessions > 1]
    return max(0.0, median(more or [0.0])), one_s


def _measure_gateway(stack: MeasuredStack, num_prompts: int, max_tokens: int) -> dict[str, float]:
    """Measures what the services' forwards do not explain of rounds with a draft at one stream and of first tokens."""
    prompts = code_prompts(num_prompts)
    for shape in (plain(16), Shape(16, METHOD, MAX_DRAFT_TOKENS)):
        asyncio.run(run_load(stack.state.url, prompts, shape, 1))  # fills the prefix cache
    plain_s, _ = _host_s_per_round(stack, prompts, plain(max_tokens))
    before = {service: stack.scrape(service) for service in ("verifier", "drafter")}
    drafted_s, grown = _host_s_per_round(stack, prompts, Shape(max_tokens, METHOD, _ROUND_DRAFT_TOKENS))
    services = {service: growth(before[service], stack.scrape(service)) for service in before}
    first = asyncio.run(run_load(stack.state.url, prompts, plain(1), 1))
    return {
        "round_overhead_s": grown["round_overhead_seconds_sum"] / grown["round_overhead_seconds_count"],
        "first_token_s": mean(request.first_token_s for request in first.requests),
        "round_forward_s": mean_of(services["verifier"], "forward_seconds"),
        "round_draft_s": mean_of(services["drafter"], "draft_seconds", f'{{method="{METHOD}"}}'),
        "host_round_s": plain_s,
        "host_draft_s": max(0.0, drafted_s - plain_s),
    }


def _host_s_per_round(stack: MeasuredStack, prompts: list[str], shape: Shape) -> tuple[float, dict[str, float]]:
    """Returns the seconds that gateway, Redis and this process take for a round, and the gateway's growth."""
    pids = [stack.state.pids[name] for name in ("gateway", "redis")] + [os.getpid()]
    before, cpu_s = stack.scrape("gateway"), sum(map(_cpu_s, pids))
    asyncio.run(run_load(stack.state.url, prompts, shape, 1))
    grown, cpu_s = growth(before, stack.scrape("gateway")), sum(map(_cpu_s, pids)) - cpu_s
    return cpu_s / grown["round_overhead_seconds_count"] / len(os.sched_getaffinity(0)), grown


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far (proc(5): the 14th and 15th field)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _record_acceptance(url: str, num_prompts: int, max_tokens: int) -> dict[str, Domain]:
    code, prose = code_prompts(num_prompts), prose_prompts(num_prompts)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return {
            "code": await _record_domain(client, code, max_tokens, temperature=0.0),
            "prose": await _record_domain(client, prose, max_tokens, temperature=0.0),
            "code at temperature 1": await _record_domain(client, code, max_tokens, temperature=1.0),
        }


async def _record_domain(
    client: httpx.AsyncClient, prompts: Sequence[str], max_tokens: int, temperature: float
) -> Domain:
    num_prompt_tokens, accepted = [], []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": 7, "ignore_eos": True}
        speculation = {"method": METHOD, "num_speculative_tokens": MAX_DRAFT_TOKENS, "mode": "exact"}
        reply = await client.post("/v1/completions", json={**body, "speculation": speculation})
        reply.raise_for_status()
        answer = reply.json()
        figures = answer["metrics"]["speculative_decoding"]
        steps = zip(figures["per_step_accepted"], figures["per_step_drafted"], strict=True)
        num_prompt_tokens.append(answer["usage"]["prompt_tokens"])
        # The last drafts of a request are cut to what may still come; they tell less.
        accepted.append(tuple(step for step, drafted in steps if drafted == MAX_DRAFT_TOKENS))
    return Domain(MAX_DRAFT_TOKENS, tuple(num_prompt_tokens), tuple(accepted))


def prose_prompts(count: int) -> list[str]:
    """Beginnings of documentation out of the standard library."""
    texts = []
    for module in (argparse, inspect, json, random, tempfile, textwrap, zipfile, Path):
        for _, member in inspect.getmembers(module):
            text = inspect.getdoc(member) or ""
            if len(text) > 240:
                texts.append('"""' + text[: text.rfind(" ", 0, 200)])
    return list(dict.fromkeys(texts))[:count]


if __name__ == "__main__":
    typer.run(main)
