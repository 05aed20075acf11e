"""The cost of row invariance: `python -m benchmarks.row_invariance`.

The expanded demo target with transformers' own linears and with the row-invariant ones, all else equal. One decode step
(1 row) and one verify step (6 rows) at a context of 256; sides alternate; medians. Rows go to
benchmarks/results/row_invariance.jsonl.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.records import quantiles, save_rows
from benchmarks.screen import console, say, table
from benchmarks.simulation.stack import expanded_target
from outrider.engine.attention.batch import ForwardBatch, SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner

CONTEXT_LEN = 256
BLOCK_SIZE = 16
ROW_COUNTS = {"decode (1 row)": 1, "verify (6 rows)": 6, "16 sessions x 6 rows": 96}


def main(
    target: Annotated[str, typer.Option(help="Small target to expand.")] = "models/demo-target",
    repeats: Annotated[int, typer.Option(help="Steps per side.")] = 60,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/row_invariance.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.row_invariance --repeats 200 --no-save"""
    with expanded_target(Path(target), say) as expanded:
        runners = {
            "stock": _runner(str(expanded), row_invariant=False),
            "row-invariant": _runner(str(expanded), row_invariant=True),
        }
        rows = [_measure(name, count, runners, repeats) for name, count in ROW_COUNTS.items()]
    title = "One forward of the expanded target; linears by side"
    shown = table("step", "stock", "row-invariant", "ratio", title=title)
    for row in rows:
        stock, ours = row["stock_s"]["p50"], row["row_invariant_s"]["p50"]
        shown.add_row(row["step"], f"{stock * 1e3:.2f} ms", f"{ours * 1e3:.2f} ms", f"{row['ratio']:.3f}")
    console.print(shown)
    if save:
        console.print(f"rows appended to {save_rows('row_invariance', rows)}")


def _runner(path: str, *, row_invariant: bool) -> ModelRunner:
    loaded = load_model(path, row_invariant=row_invariant)
    return ModelRunner(loaded, loaded.make_cache(16 * (CONTEXT_LEN // BLOCK_SIZE + 2), BLOCK_SIZE))


def _batch(num_rows: int) -> ForwardBatch:
    """One session of up to 6 rows, or several sessions of 6 rows."""
    per_session = min(num_rows, 6)
    blocks = CONTEXT_LEN // BLOCK_SIZE + 2
    sessions = [
        SessionRows(
            token_ids=[(session * 31 + row) % 1000 + 5 for row in range(per_session)],
            context_len=CONTEXT_LEN,
            block_ids=list(range(session * blocks, (session + 1) * blocks)),
            num_logits_rows=per_session,
        )
        for session in range(num_rows // per_session)
    ]
    return build_batch(sessions, BLOCK_SIZE)


def _measure(name: str, num_rows: int, runners: dict[str, ModelRunner], repeats: int) -> dict[str, Any]:
    batch = _batch(num_rows)
    seconds: dict[str, list[float]] = {side: [] for side in runners}
    for runner in runners.values():
        for _ in range(5):
            runner.forward(batch)
    for _ in track(range(repeats), description=name, console=console):
        for side, runner in runners.items():
            started = time.perf_counter()
            runner.forward(batch)
            seconds[side].append(time.perf_counter() - started)
    return {
        "step": name,
        "num_rows": num_rows,
        "context_len": CONTEXT_LEN,
        "num_threads": torch.get_num_threads(),
        "stock_s": quantiles(seconds["stock"]),
        "row_invariant_s": quantiles(seconds["row-invariant"]),
        "ratio": median(seconds["row-invariant"]) / median(seconds["stock"]),
    }


if __name__ == "__main__":
    typer.run(main)
