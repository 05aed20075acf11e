"""Speed of the whole stack: `python -m benchmarks.serving` (or `make bench`).

One run on one machine: this stack over REST with speculation off, ngram, draft_model and auto; transformers' generate
plain, assisted and with prompt lookup, with the same weights, prompts and greedy settings; and llama.cpp's server if
given by `--llama-server`. The demo target is expanded to a realistic cost (models/make/expand.py): acceptance is the
small model's, cost the large one's.
Sides alternate; figures are medians over rounds. Rows go to benchmarks/results/serving.jsonl.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.peers.llama_cpp import VARIANTS as LLAMA_CPP_VARIANTS
from benchmarks.peers.llama_cpp import LlamaCppPeer
from benchmarks.peers.transformers import VARIANTS as TRANSFORMERS_VARIANTS
from benchmarks.peers.transformers import TransformersPeer
from benchmarks.prompts import code_prompts
from benchmarks.records import quantiles, save_rows
from benchmarks.screen import console, say, table
from benchmarks.simulation.stack import expanded_target
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack

NUM_SPECULATIVE_TOKENS = 5
NUM_PEER_PROMPTS = 4
METHODS = ("off", "ngram", "draft_model", "auto")
GREEDY = {method: {"method": method} for method in METHODS}
# Exact and rejection mode at temperature 1, measured at one stream.
SAMPLED = {
    "off, T=1": {"method": "off", "temperature": 1.0, "mode": "exact", "seed": 7},
    "draft_model, T=1 exact": {"method": "draft_model", "temperature": 1.0, "mode": "exact", "seed": 7},
    "draft_model, T=1 rejection": {"method": "draft_model", "temperature": 1.0, "mode": "rejection"},
}


@dataclass(frozen=True)
class Plan:
    max_tokens: int
    rounds: int
    prompts_per_stream: int
    streams: tuple[int, ...]
    num_drafters: int = 0


def main(
    target: Annotated[str, typer.Option(help="Small target to expand.")] = "models/demo-target",
    draft: Annotated[str, typer.Option(help="Draft model.")] = "models/demo-draft",
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them.")] = 3,
    streams: Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")] = "1,4,16",
    num_drafters: Annotated[
        int, typer.Option(min=0, help="Drafter processes; 0: the verifier drafts in its own process.")
    ] = 0,
    peer: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    llama_server: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, resolve_path=True, help="llama.cpp's llama-server, to measure it too."
        ),
    ] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/serving.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.serving --streams 1 --rounds 5"""
    plan = Plan(max_tokens, rounds, 2, tuple(int(part) for part in streams.split(",")), num_drafters)
    with expanded_target(Path(target), say) as expanded:
        rows, outputs = _measure(str(expanded), draft, plan)
        rows += _measure_peers(str(expanded), draft, plan, outputs, transformers=peer, llama_server=llama_server)
    _show(rows)
    if save:
        console.print(f"rows appended to {save_rows('serving', rows)}")


def _measure(target: str, draft: str, plan: Plan) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The stack's rows, and its output token ids for the peers' prompts."""
    rows: list[dict[str, Any]] = []
    settings = StackSettings(
        model=target,
        draft_model=draft,
        methods=("draft_model", "ngram"),
        port=0,
        grpc_port=-1,
        num_drafters=plan.num_drafters,
    )
    with tempfile.TemporaryDirectory() as run_dir, Stack(settings, Path(run_dir), say, in_foreground=True) as state:
        asyncio.run(_warm_up(state.url))
        for num_streams in plan.streams:
            found = _measure_stack(state.url, num_streams, plan)
            rows += [{**row, "num_drafters": plan.num_drafters} for row in found]
        said = asyncio.run(run_load(state.url, code_prompts(NUM_PEER_PROMPTS), _shape(plan), 1))
    return rows, [request.token_ids for request in said.requests]


async def _warm_up(url: str) -> None:
    for method in METHODS:
        await run_load(url, code_prompts(2), Shape(32, method, NUM_SPECULATIVE_TOKENS), 1)


def _measure_stack(url: str, num_streams: int, plan: Plan) -> list[dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = GREEDY | (SAMPLED if num_streams == 1 else {})
    results: dict[str, list[LoadResult]] = {name: [] for name in variants}
    overheads: dict[str, list[float]] = {name: [] for name in variants}
    prompts = code_prompts(max(4, num_streams * plan.prompts_per_stream))
    # Fills the prefix cache for all variants, or the first would pay for all.
    asyncio.run(run_load(url, prompts, Shape(1, num_speculative_tokens=NUM_SPECULATIVE_TOKENS), num_streams))
    with Progress(console=console) as progress:
        task = progress.add_task(f"{num_streams} streams", total=plan.rounds * len(variants))
        for _ in range(plan.rounds):
            for name, wanted in variants.items():
                before = _overhead_buckets(url)
                results[name].append(asyncio.run(run_load(url, prompts, _shape(plan, **wanted), num_streams)))
                overheads[name].append(_median_overhead(before, _overhead_buckets(url)))
                progress.advance(task)
    return [_row(name, num_streams, results[name], overheads[name]) for name in variants]


def _shape(plan: Plan, **wanted: Any) -> Shape:
    """Exactly `max_tokens`, without stop tokens, as for the peers."""
    return Shape(plan.max_tokens, num_speculative_tokens=NUM_SPECULATIVE_TOKENS, min_tokens=plan.max_tokens, **wanted)


def _row(method: str, num_streams: int, results: list[LoadResult], overheads: list[float]) -> dict[str, Any]:
    requests = [request for result in results for request in result.requests]
    return {
        "system": "outrider",
        "variant": method,
        "num_streams": num_streams,
        "tokens_per_s": median(result.tokens_per_s for result in results),
        "tokens_per_s_quantiles": quantiles([result.tokens_per_s for result in results]),
        "ttft_s": quantiles([request.first_token_s for request in requests]),
        "itl_s": quantiles([gap for request in requests for gap in request.gaps_s]),
        "mean_acceptance_length": median(request.mean_acceptance_length for request in requests),
        "round_overhead_p50_s": median(overheads),
        "token_ids_digest": _digest(results[0]),
    }


def _digest(result: LoadResult) -> str:
    """Equal digests at one stream count mean the same token ids, for any method."""
    text = repr([request.token_ids for request in result.requests])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _measure_peers(
    target: str,
    draft: str,
    plan: Plan,
    outputs: list[list[int]],
    *,
    transformers: bool,
    llama_server: Path | None,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if transformers:
        stock = TransformersPeer(target, draft)
        rows += _measure_peer("transformers", stock, tuple(TRANSFORMERS_VARIANTS), plan, outputs)
    if llama_server:
        with LlamaCppPeer(llama_server, target, draft) as llama_cpp:
            rows += _measure_peer("llama.cpp", llama_cpp, LLAMA_CPP_VARIANTS, plan, outputs)
    return rows


def _measure_peer(
    system: str,
    peer: TransformersPeer | LlamaCppPeer,
    variants: tuple[str, ...],
    plan: Plan,
    outputs: list[list[int]],
) -> list[dict[str, Any]]:
    """One row per variant, `plain` first. outputs: the stack's token ids, for comparison."""
    prompts = code_prompts(NUM_PEER_PROMPTS)
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    said: dict[str, list[list[int]]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task(system, total=(plan.rounds + 1) * len(variants))
        for round_index in range(plan.rounds + 1):
            for variant in variants:
                run = peer.run(variant, prompts, plan.max_tokens if round_index else 16)
                if round_index:  # the first round warms up
                    rates[variant].append(run.num_tokens / run.seconds)
                    said[variant] = run.token_ids
                progress.advance(task)
    return [
        {
            "system": system,
            "variant": variant,
            "num_streams": 1,
            "tokens_per_s": median(rates[variant]),
            "tokens_per_s_quantiles": quantiles(rates[variant]),
            "outputs_equal_to_plain": _num_equal(said[variant], said["plain"]),
            "outputs_equal_to_outrider": _num_equal(said[variant], outputs),
        }
        for variant in variants
    ]


def _num_equal(outputs: list[list[int]], others: list[list[int]]) -> str:
    return f"{sum(one == other for one, other in zip(outputs, others, strict=True))}/{len(outputs)}"


_BUCKET = re.compile(r'^outrider:round_overhead_seconds_bucket\{.*\ble="([^"]+)".*\} (\S+)$', re.MULTILINE)


def _overhead_buckets(url: str) -> dict[float, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}


def _median_overhead(before: dict[float, float], after: dict[float, float]) -> float:
    """Median of the histogram's growth, linear within its bucket."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    half, low, below = counts[-1][1] / 2, 0.0, 0.0
    for bound, count in counts:
        if count >= half:
            return low + (bound - low) * (half - below) / max(count - below, 1e-9) if bound != float("inf") else low
        low, below = bound, count
    return low


def _show(rows: list[dict[str, Any]]) -> None:
    shown = table(
        *("system", "variant", "streams", "tokens/s", "ratio", "TTFT p50", "ITL p50/p99", "accept len", "overhead p50"),
        "same as plain, as ours",
        title="Greedy, same weights and prompts; ratios to each system's own plain mode at the same load",
        num_names=2,
    )
    plain = {
        (row["system"], row["num_streams"]): row["tokens_per_s"] for row in rows if row["variant"] in ("off", "plain")
    }
    for row in rows:
        ratio = row["tokens_per_s"] / plain[row["system"], row["num_streams"]]
        ours = row["system"] == "outrider"
        shown.add_row(
            row["system"],
            row["variant"],
            str(row["num_streams"]),
            f"{row['tokens_per_s']:.1f}",
            f"{ratio:.2f}",
            f"{row['ttft_s']['p50'] * 1e3:.0f} ms" if ours else "",
            f"{row['itl_s']['p50'] * 1e3:.1f}/{row['itl_s']['p99'] * 1e3:.1f} ms" if ours else "",
            f"{row['mean_acceptance_length']:.2f}" if ours else "",
            f"{row['round_overhead_p50_s'] * 1e3:.2f} ms" if ours else "",
            "" if ours else f"{row['outputs_equal_to_plain']}, {row['outputs_equal_to_outrider']}",
        )
    if not any(row["system"] == "llama.cpp" for row in rows):
        shown.add_row("llama.cpp", "not measured: no --llama-server")
    console.print(shown)
    console.print(f"{len(os.sched_getaffinity(0))} cores; the clients run on the same cores as the stack")


if __name__ == "__main__":
    typer.run(main)
