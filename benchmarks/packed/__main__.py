"""Quantised weights packed in memory, against the same weights dequantised: `python -m benchmarks.packed MODEL`.

Seconds to load, resident memory, and the time of a forward by its number of rows. Each side in a process of its own,
twice in alternation; medians. Rows go to benchmarks/results/packed.jsonl.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.records import quantiles, save_rows
from benchmarks.screen import console, table
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.guards import read_config
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.weights import read_weights
from outrider.engine.run.runner import ModelRunner

SIDES = ("packed", "dequantised")
ROW_COUNTS = (1, 2, 4, 6, 8, 12, 16, 128)
CONTEXT_LEN = 64
BLOCK_SIZE = 16


def main(
    model: Annotated[str, typer.Argument(help="A quantised checkpoint: folder or .gguf file.")],
    side: Annotated[str, typer.Option(help="packed or dequantised: measure this one here, and print it as JSON.")] = "",
    repeats: Annotated[int, typer.Option(help="Forwards per row count.")] = 40,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/packed.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.packed SmolLM2-135M-Instruct.Q4_1.gguf --no-save"""
    if side:
        print(json.dumps(_measure(model, side, repeats)))
        return
    model_folder(model)  # made before anything is measured
    rows: list[dict[str, Any]] = []
    for name in (*SIDES, *SIDES):
        command = [sys.executable, "-m", "benchmarks.packed", model, "--side", name, "--repeats", str(repeats)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    names = [name for name in rows[0] if name != "model"]
    shown = table(*names, title=rows[0]["model"])
    for row in rows:
        shown.add_row(*(f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in names))
    console.print(shown)
    if save:
        print(f"rows appended to {save_rows('packed', rows)}")


def _measure(model: str, side: str, repeats: int) -> dict[str, Any]:
    path = model_folder(model)
    start = time.perf_counter()
    loaded = load_model(path, make_model=None if side == "packed" else _dequantised)
    row: dict[str, Any] = {"model": Path(model).name, "side": side, "load_s": time.perf_counter() - start}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS"):
            row[f"{name}_mb"] = int(value.split()[0]) * 1024 / 1e6
    return row | {f"rows_{count}_ms": quantiles(times)["p50"] for count, times in _forwards(loaded, repeats).items()}


def _dequantised(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    return read_weights(path, read_config(path), dtype, device)


@torch.inference_mode()
def _forwards(loaded: LoadedModel, repeats: int) -> dict[int, list[float]]:
    """Row count -> milliseconds of each forward."""
    longest = CONTEXT_LEN + max(ROW_COUNTS)
    token_ids = [5 + place * 31 % 1000 for place in range(longest)]
    blocks = list(range(longest // BLOCK_SIZE))
    runner = ModelRunner(loaded, loaded.make_cache(len(blocks), BLOCK_SIZE), graphs=True)
    runner.forward(build_batch([SessionRows(token_ids[:CONTEXT_LEN], 0, blocks, 0)], BLOCK_SIZE))
    found: dict[int, list[float]] = {}
    for count in ROW_COUNTS:
        batch = [SessionRows(token_ids[CONTEXT_LEN : CONTEXT_LEN + count], CONTEXT_LEN, blocks, 1)]
        times = []
        for _ in range(repeats + 10):
            start = time.perf_counter()
            runner.forward(build_batch(batch, BLOCK_SIZE))
            times.append(1000 * (time.perf_counter() - start))
        found[count] = times[10:]  # the first ones compile and record
    return found


if __name__ == "__main__":
    typer.run(main)
