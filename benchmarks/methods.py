"""The gain of each draft method on a target of realistic cost: `python -m benchmarks.methods`.

The demo target and its heads are expanded together (training/demo/expand.py, training/demo/expand_heads.py): acceptance
is the demo family's, costs are those of a 158 M target and heads of its width. One stream through the whole stack, each
method in turn, at temperature 0 and at 1 in exact mode; figures are medians over rounds. Rows go to
benchmarks/results/methods.jsonl.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import quantiles, save_rows
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack, free_port
from outrider.training.demo.expand import main as expand
from outrider.training.demo.expand_heads import expand_head

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
HEADS = ("medusa", "mlp-speculator", "eagle", "eagle3")
METHODS = ("ngram", "suffix", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "auto")
CHAIN, TREE = 5, 16
_TREES = ("draft_model", "medusa", "mlp_speculator", "eagle", "eagle3")


def main(
    models: Annotated[Path, typer.Option(help="Folder of the demo family.")] = Path("models"),
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them.")] = 3,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; 0 and 1 if absent.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/methods.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.methods --rounds 1 --temperature 0"""
    temperatures = temperature or [0.0, 1.0]
    with tempfile.TemporaryDirectory() as folder:
        console.print("==> expanding target and heads to a realistic cost")
        target = Path(folder) / "target"
        expand(models / "demo-target", target)
        drafts = [str(models / "demo-draft")]
        for name in HEADS:
            expand_head(models / f"demo-{name}", models / "demo-target", target, Path(folder) / name)
            drafts.append(str(Path(folder) / name))
        settings = StackSettings(
            model=str(target), draft_model=",".join(drafts), port=free_port(), grpc_port=free_port()
        )
        stack = Stack(settings, Path(folder), lambda message: console.print(f"==> {message}"))
        state = stack.start()
        try:
            rows = _measure(state.url, temperatures, max_tokens, rounds)
        finally:
            stack.stop()
    _show(rows)
    if save:
        console.print(f"rows appended to {save_rows('methods', rows)}")


def _variants(temperature: float) -> dict[str, dict[str, Any]]:
    seed = 7 if temperature else None
    common = {"temperature": temperature, "seed": seed, "num_speculative_tokens": CHAIN}
    variants = {name: {**common, "method": name} for name in ("off", *METHODS)}
    for name in _TREES:
        variants[f"{name}, tree of {TREE}"] = {
            **common, "method": name, "num_speculative_tokens": TREE, "token_tree": True
        }  # fmt: skip
    return variants


def _measure(url: str, temperatures: list[float], max_tokens: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    prompts = code_prompts(4)
    for temperature in temperatures:
        variants = _variants(temperature)
        results: dict[str, list[LoadResult]] = {name: [] for name in variants}
        with Progress(console=console) as progress:
            task = progress.add_task(f"temperature {temperature:g}", total=(rounds + 1) * len(variants))
            for round_index in range(rounds + 1):  # the first, short one warms up
                for name, wanted in variants.items():
                    shape = Shape(max_tokens if round_index else 16, **wanted)
                    result = asyncio.run(run_load(url, prompts, shape, 1))
                    if round_index:
                        results[name].append(result)
                    progress.advance(task)
        rows += [_row(name, temperature, found) for name, found in results.items()]
    return rows


def _row(name: str, temperature: float, results: list[LoadResult]) -> dict[str, Any]:
    requests = [request for result in results for request in result.requests]
    return {
        "variant": name,
        "temperature": temperature,
        "tokens_per_s": median(result.tokens_per_s for result in results),
        "tokens_per_s_quantiles": quantiles([result.tokens_per_s for result in results]),
        "mean_acceptance_length": median(request.mean_acceptance_length for request in requests),
        "num_outputs_seen": len({tuple(request.token_ids) for request in requests}),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("variant", "temperature", "tokens/s", "of off", "accept len", "outputs of 4 prompts")
    plain = {row["temperature"]: row["tokens_per_s"] for row in rows if row["variant"] == "off"}
    for row in rows:
        rate = row["tokens_per_s"]
        table.add_row(
            row["variant"],
            f"{row['temperature']:g}",
            f"{rate:.1f}",
            f"{rate / plain[row['temperature']]:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            str(row["num_outputs_seen"]),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
