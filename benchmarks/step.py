"""The cost of one forward: `python -m benchmarks.step`.

Steps of 1 to 32 rows at a context of 256, for the demo draft model and the expanded demo target (158 M parameters):
ours as served (recorded), ours through Python (lean), ours without the lean modules, and transformers' own forward
(sdpa, its DynamicCache) on the same weights. Sides alternate call by call. Medians, and minima, which are more robust
on a busy machine. Rows go to benchmarks/results/step.jsonl.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.records import quantiles, save_rows
from models.make.expand import main as expand
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.run.cpu_graphs import MEETINGS_BEFORE_RECORDING
from outrider.engine.run.runner import ModelRunner

# characters; fits the table when the output goes to a file
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
CONTEXT_LEN = 256
BLOCK_SIZE = 16
MAX_ROWS = 32
SIDES = ("recorded", "lean", "not lean", "transformers")
Step = Callable[[int], None]


def main(
    target: Annotated[str, typer.Option(help="Small target to expand.")] = "models/demo-target",
    draft: Annotated[str, typer.Option(help="Draft model, measured unchanged.")] = "models/demo-draft",
    repeats: Annotated[int, typer.Option(help="Steps per side and row count.")] = 60,
    threads: Annotated[int, typer.Option(help="torch threads; 0: torch's choice.")] = 0,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/step.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.step --repeats 200 --threads 1 --no-save"""
    if threads:
        torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        expanded = Path(folder) / "expanded-target"
        expand(Path(target), expanded)
        for name, path in (("draft", draft), ("expanded target", str(expanded))):
            steps = _steps(path)
            counts = [1 << power for power in range(MAX_ROWS.bit_length())]
            rows += [_measure(name, count, steps, repeats) for count in counts]
    console.print(_table(rows))
    if save:
        console.print(f"rows appended to {save_rows('step', rows)}")


def _steps(path: str) -> dict[str, Step]:
    """Per side, a function that runs a step with a given number of rows."""
    context = [5 + position * 31 % 1000 for position in range(CONTEXT_LEN + MAX_ROWS)]
    theirs = _transformers_step(path, torch.tensor([context]))
    return {
        "recorded": _our_step(path, context, lean=True, graphs=True),
        "lean": _our_step(path, context, lean=True),
        "not lean": _our_step(path, context, lean=False),
        "transformers": theirs,
    }


def _our_step(path: str, context: list[int], *, lean: bool, graphs: bool = False) -> Step:
    loaded = load_model(path, lean=lean)
    num_blocks = (CONTEXT_LEN + MAX_ROWS) // BLOCK_SIZE
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks, BLOCK_SIZE), graphs=graphs)
    blocks = list(range(num_blocks))
    runner.forward(build_batch([SessionRows(context[:CONTEXT_LEN], 0, blocks, 0)], BLOCK_SIZE))

    def step(num_rows: int) -> None:
        tokens = context[CONTEXT_LEN : CONTEXT_LEN + num_rows]
        runner.forward(build_batch([SessionRows(tokens, CONTEXT_LEN, blocks, num_rows)], BLOCK_SIZE))

    return step


def _transformers_step(path: str, context: torch.Tensor) -> Step:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="sdpa").eval()
    positions = torch.arange(CONTEXT_LEN + MAX_ROWS)[None]
    with torch.inference_mode():
        cache = model(context[:, :CONTEXT_LEN], use_cache=True).past_key_values

    @torch.inference_mode()
    def step(num_rows: int) -> None:
        rows = slice(CONTEXT_LEN, CONTEXT_LEN + num_rows)
        model(context[:, rows], position_ids=positions[:, rows], past_key_values=cache, use_cache=True)
        cache.crop(-num_rows)

    return step


def _measure(model: str, num_rows: int, steps: dict[str, Step], repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for step in steps.values():
        for _ in range(MEETINGS_BEFORE_RECORDING + 1):
            step(num_rows)
    for _ in track(range(repeats), description=f"{model}, {num_rows} rows", console=console):
        for side in SIDES:
            started = time.perf_counter()
            steps[side](num_rows)
            seconds[side].append(time.perf_counter() - started)
    return {
        "model": model,
        "num_rows": num_rows,
        "context_len": CONTEXT_LEN,
        "num_threads": torch.get_num_threads(),
        **{f"{side.replace(' ', '_')}_s": quantiles(values) | {"min": min(values)} for side, values in seconds.items()},
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="One forward at a context of 256: median (minimum), ms")
    for column in ("model", "rows", *SIDES, "recorded / transformers"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [row[f"{side.replace(' ', '_')}_s"] for side in SIDES]
        ratios = [times[0][key] / times[-1][key] for key in ("p50", "min")]
        table.add_row(
            row["model"],
            str(row["num_rows"]),
            *(f"{taken['p50'] * 1e3:.2f} ({taken['min'] * 1e3:.2f})" for taken in times),
            f"{ratios[0]:.2f} ({ratios[1]:.2f})",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
