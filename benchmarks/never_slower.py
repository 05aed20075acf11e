"""Is `auto` ever slower than not speculating? How far from the best fixed length? `python -m benchmarks.never_slower`

Streams x temperatures x drafters, one of them always wrong (a draft model of random weights), on mixed prompts: code,
prose, copying. One stack per drafter; off, auto, off again and the fixed lengths take turns, back and forth. Ratios are
medians over what stood in one round; `off again` over `off` shows what the measurement itself gets wrong. `auto` has
seen each load for some seconds before the measured rounds, as in a server that has run for a while. Rows go to
benchmarks/results/never_slower.jsonl. Traffic that the policy was not tuned on: never_slower_held_out.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.load import run_for, run_load
from benchmarks.prompts import mixed_prompts
from benchmarks.records import quantiles, save_rows
from benchmarks.turns import CONTROL, PROMISED, Measured, best_fixed, ratio, shape_for, take_turns, variants
from models.make.expand import main as expand
from models.make.expand_heads import expand_head
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack, free_port

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
DRAFTERS = ("draft_model", "eagle3", "ngram", "wrong")
# Holds the 64 prompts of 32 streams and what follows them. With the default every round of 32 streams read all prompts
# anew, 10,800 tokens for 4,096 decoded, and those of fewer streams none.
_KV_CACHE_MB = 1024
# With six, one stream's round was over in two seconds, and two measurements of one thing differed by a tenth.
_FEWEST_PROMPTS = 12


@dataclass(frozen=True)
class Plan:
    streams: tuple[int, ...]
    temperatures: tuple[float, ...]
    lengths: tuple[int, ...]
    max_tokens: int
    rounds: int
    num_drafters: int
    learn_s: float


def main(
    models: Annotated[Path, typer.Option(help="Folder of the demo family.")] = Path("models"),
    drafters: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(DRAFTERS),
    streams: Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")] = "1,2,4,8,16,32",
    temperatures: Annotated[str, typer.Option(help="Comma-separated; above 0 with a seed.")] = "0,1",
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths to compare with, comma-separated.")] = "1,2,3,5",
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 64,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them.")] = 3,
    num_drafters: Annotated[int, typer.Option(min=0, help="Drafter processes; 0: the verifier drafts by itself.")] = 0,
    learn_s: Annotated[float, typer.Option(help="Seconds for which `auto` sees each load before it is measured.")] = 15,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/never_slower.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.never_slower --drafters draft_model --streams 1,16 --rounds 1"""
    plan = Plan(
        tuple(map(int, streams.split(","))),
        tuple(map(float, temperatures.split(","))),
        tuple(map(int, lengths.split(","))),
        max_tokens,
        rounds,
        num_drafters,
        learn_s,
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        console.print("==> expanding the target to a model of real cost")
        target = Path(folder) / "target"
        expand(models / "demo-target", target)
        for drafter in drafters.split(","):
            checkpoint, method = _checkpoint(drafter, models, target, Path(folder))
            rows += _measure(drafter, method, str(target), checkpoint, Path(folder) / f"run-{drafter}", plan)
    _show(rows, plan)
    if save:
        console.print(f"rows appended to {save_rows('never_slower', rows)}")


def _checkpoint(drafter: str, models: Path, target: Path, folder: Path) -> tuple[str, str]:
    """Folder of the drafter's checkpoint, "" where it has none, and its method."""
    if drafter == "ngram":
        return "", "ngram"
    if drafter == "draft_model":
        return str(models / "demo-draft"), "draft_model"
    if drafter == "wrong":
        return str(_random_draft(models / "demo-draft", folder / "wrong")), "draft_model"
    expand_head(models / f"demo-{drafter}", models / "demo-target", target, folder / drafter)
    return str(folder / drafter), drafter


def _random_draft(like: Path, out: Path) -> Path:
    """A draft model of the same shape and cost that has learned nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(like)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(like).save_pretrained(out)
    return out


def _measure(
    drafter: str, method: str, target: str, checkpoint: str, run_dir: Path, plan: Plan
) -> list[dict[str, Any]]:
    settings = StackSettings(
        model=target,
        draft_model=checkpoint,
        methods=(method,),
        port=free_port(),
        grpc_port=free_port(),
        num_drafters=plan.num_drafters,
        verifier_args=("--kv-cache-mb", str(_KV_CACHE_MB)),
    )
    stack = Stack(settings, run_dir, lambda _message: None)
    console.print(f"==> {drafter}: starting the stack")
    state = stack.start()
    rows = []
    try:
        with Progress(console=console) as progress:
            task = progress.add_task(drafter, total=len(plan.temperatures) * len(plan.streams))
            for temperature in plan.temperatures:
                for num_streams in plan.streams:
                    cell = {"drafter": drafter, "temperature": temperature, "num_streams": num_streams}
                    cell["num_drafters"] = plan.num_drafters
                    rows += [{**cell, **row} for row in _cell(state.url, method, temperature, num_streams, plan)]
                    progress.advance(task)
    finally:
        stack.stop()
    return rows


def _cell(url: str, method: str, temperature: float, num_streams: int, plan: Plan) -> list[dict[str, Any]]:
    drafts = variants(method, plan.lengths)
    prompts = mixed_prompts(max(_FEWEST_PROMPTS, 2 * num_streams))
    shapes = {name: shape_for(draft, plan.max_tokens, temperature) for name, draft in drafts.items()}
    run_for(url, prompts, shapes["off"], num_streams, 0.0)
    run_for(url, prompts, shapes["auto"], num_streams, plan.learn_s)

    def run(name: str, _round_index: int) -> Measured:
        result = asyncio.run(run_load(url, prompts, shapes[name], num_streams))
        return Measured(result.tokens_per_s, [request.token_ids for request in result.requests])

    return [
        {
            "variant": name,
            "tokens_per_s": median(found),
            "tokens_per_s_quantiles": quantiles(found),
            "tokens_per_s_of_rounds": found,
        }
        for name, found in take_turns(list(drafts), plan.rounds, run).items()
    ]


def _show(rows: list[dict[str, Any]], plan: Plan) -> None:
    table = Table(
        "drafter", "T", "streams", "off", "auto", "auto / off", f"{CONTROL} / off", "best fixed", "auto / best"
    )
    worst_of_off, worst_of_best = 10.0, 10.0
    cells = {(row["drafter"], row["temperature"], row["num_streams"]) for row in rows}
    for drafter, temperature, num_streams in sorted(cells):
        found = {
            row["variant"]: row["tokens_per_s_of_rounds"]
            for row in rows
            if (row["drafter"], row["temperature"], row["num_streams"]) == (drafter, temperature, num_streams)
        }
        best = best_fixed(found)
        of_off, of_best = ratio(found["auto"], found["off"]), ratio(found["auto"], found[best])
        worst_of_off, worst_of_best = min(worst_of_off, of_off), min(worst_of_best, of_best)
        table.add_row(
            *(drafter, f"{temperature:g}", str(num_streams)),
            *(f"{median(found['off']):.1f}", f"{median(found['auto']):.1f}", f"{of_off:.2f}"),
            *(f"{ratio(found[CONTROL], found['off']):.2f}", f"{best}: {median(found[best]):.1f}", f"{of_best:.2f}"),
        )
    console.print(table)
    console.print(
        f"the least of auto / off is {worst_of_off:.2f} (promised: {PROMISED}), of auto / best {worst_of_best:.2f} "
        f"(aim: 0.95); medians of {plan.rounds} rounds"
    )


if __name__ == "__main__":
    typer.run(main)
