"""Tokens per second of the demo hybrid's drafters: `python -m benchmarks.hybrid.methods`.

One stream through the whole stack, bf16, the verifier drafting by itself, each variant in turn; figures are medians
over rounds, and go to `hybrid-evaluation.json` beside those of training.demo.hybrid_rounds. The model is tiny, so a
forward's fixed cost weighs as nowhere else: not what a hybrid of a useful size gains.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import quantiles
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack, free_port

METHODS = ("mtp", "eagle3", "ngram")
DRAFT_LENS = (1, 3, 5)


def variants() -> dict[str, tuple[str, int]]:
    """Name -> method and draft length."""
    drafted = {f"{method} {length}": (method, length) for method in METHODS for length in DRAFT_LENS}
    return {"off": ("off", 1), **drafted, "auto": ("auto", max(DRAFT_LENS))}


def measure(url: str, max_tokens: int, rounds: int, temperature: float) -> dict[str, dict[str, Any]]:
    """Per variant. The first, short round warms up."""
    prompts, seed = code_prompts(4), 7 if temperature else None
    results: dict[str, list[LoadResult]] = {name: [] for name in variants()}
    for round_index in range(rounds + 1):
        for name, (method, length) in variants().items():
            shape = Shape(max_tokens if round_index else 16, method, length, temperature, seed)
            result = asyncio.run(run_load(url, prompts, shape, 1))
            if round_index:
                results[name].append(result)
    return {name: _figures(found) for name, found in results.items()}


def _figures(results: list[LoadResult]) -> dict[str, Any]:
    requests = [request for result in results for request in result.requests]
    return {
        "tokens_per_s": median(result.tokens_per_s for result in results),
        "tokens_per_s_quantiles": quantiles([result.tokens_per_s for result in results]),
        "mean_acceptance_length": median(request.mean_acceptance_length for request in requests),
        "num_outputs_seen": len({tuple(request.token_ids) for request in requests}),
    }


def main(
    models: Annotated[Path, typer.Option(help="Folder of demo-hybrid and its head.")] = Path("models"),
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 192,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them.")] = 5,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; 0 and 1 if absent.")] = None,
    save: Annotated[bool, typer.Option(help="Write the figures into hybrid-evaluation.json.")] = True,
) -> None:
    """Example: python -m benchmarks.hybrid.methods --rounds 3"""
    console = Console(highlight=False, width=120)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = StackSettings(
            model=str(models / "demo-hybrid"),
            draft_model=str(models / "demo-hybrid-eagle3"),
            methods=METHODS,
            port=free_port(),
            grpc_port=free_port(),
            num_drafters=0,
        )
        stack = Stack(settings, Path(folder), lambda message: console.print(f"==> {message}"))
        state = stack.start()
        try:
            for degree in temperature or [0.0, 1.0]:
                figures[f"temperature_{degree:g}"] = measure(state.url, max_tokens, rounds, degree)
        finally:
            stack.stop()
    show(figures, console)
    if save:
        path = models / "hybrid-evaluation.json"
        known = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**known, "served": figures}, indent=1) + "\n", encoding="utf-8")
        console.print(f"figures written to {path}")


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("variant", "temperature", "tokens/s", "of off", "accept len", "outputs of 4 prompts")
    for temperature, rows in figures.items():
        for name, row in rows.items():
            table.add_row(
                name,
                temperature.removeprefix("temperature_"),
                f"{row['tokens_per_s']:.1f}",
                f"{row['tokens_per_s'] / rows['off']['tokens_per_s']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
                str(row["num_outputs_seen"]),
            )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
