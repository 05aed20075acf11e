"""The cost of a forward of a hybrid: `python -m benchmarks.hybrid`.

One decode row, the rows of a verification (which first replays the three rows that the round before accepted), and a
prompt, of one session: ours, and transformers' own forward (sdpa, its cache, its recurrence in plain torch, which is
what it has on a CPU) on the same weights. Sides alternate call by call; medians. transformers cannot undo a rejected
draft's state: its verification is a forward and nothing else. Rows go to benchmarks/results/hybrid.jsonl.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from benchmarks.hybrid.model import save_random_hybrid
from benchmarks.hybrid.sides import Ours, Step, Theirs
from benchmarks.records import quantiles, save_rows
from benchmarks.screen import console, table

DTYPES = ("bfloat16", "float32")
NUM_WARM_UPS = 3


def main(
    layers: Annotated[int, typer.Option(min=4, help="Layers, a multiple of 4: every fourth attends.")] = 12,
    hidden: Annotated[int, typer.Option(min=128, help="Hidden size, a multiple of 128.")] = 512,
    drafts: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens of a verification.")] = 4,
    context: Annotated[int, typer.Option(min=16, help="Positions before a decode row or a verification.")] = 256,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of the prompt.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Calls per side and step.")] = 40,
    threads: Annotated[int, typer.Option(min=0, help="torch threads; 0: torch's choice.")] = 0,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/hybrid.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.hybrid --repeats 100 --threads 2 --no-save"""
    if layers % 4 or hidden % 128:
        raise typer.BadParameter("--layers must be a multiple of 4, --hidden of 128")
    if threads:
        torch.set_num_threads(threads)
    steps = [Step("decode", 1, context), Step("verify", drafts + 1, context), Step("prompt", prompt, 0)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = save_random_hybrid(Path(folder), layers, hidden)
        for dtype in DTYPES:
            ours, theirs = Ours(str(path), dtype), Theirs(str(path), dtype)
            for step in steps:
                row = {"dtype": dtype, "num_layers": layers, "hidden_size": hidden, "step": step.name}
                rows.append(row | measure(step, ours, theirs, f"{dtype}, {step.name}", repeats))
    console.print(_table(rows))
    if save:
        console.print(f"rows appended to {save_rows('hybrid', rows)}")


def measure(step: Step, ours: Ours, theirs: Theirs, description: str, repeats: int) -> dict[str, Any]:
    sides = {"ours": ours.prepare(step), "transformers": theirs.prepare(step)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    last: dict[str, torch.Tensor] = {}
    for place in track(range(NUM_WARM_UPS + repeats), description=description, console=console):
        for side, prepared in sides.items():
            call = prepared()
            started = time.perf_counter()
            last[side] = call()
            if place >= NUM_WARM_UPS:
                seconds[side].append(time.perf_counter() - started)
    return {
        "num_rows": step.num_rows,
        "context_len": step.context_len,
        "num_threads": torch.get_num_threads(),
        "largest_difference": float((last["ours"] - last["transformers"].float()).abs().max()),
        **{f"{side}_s": quantiles(values) | {"min": min(values)} for side, values in seconds.items()},
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    shown = table(
        *("dtype", "step", "rows", "ours", "transformers", "ours / transformers", "largest difference"),
        title=f"{first['num_layers']} layers, hidden size {first['hidden_size']}: median (minimum), ms",
        num_names=2,
    )
    for row in rows:
        times = [row["ours_s"], row["transformers_s"]]
        shown.add_row(
            *(row["dtype"], row["step"], str(row["num_rows"])),
            *(f"{taken['p50'] * 1e3:.2f} ({taken['min'] * 1e3:.2f})" for taken in times),
            f"{times[0]['p50'] / times[1]['p50']:.2f}",
            f"{row['largest_difference']:.1e}",
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
