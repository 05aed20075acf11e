"""The cost of a forward of a hybrid: `python -m benchmarks.hybrid`.

One decode row, the rows of a verification (which first replays the three rows that the round before accepted), and a
prompt, of one session: ours, and transformers' own forward (sdpa, its cache, its recurrence in plain torch, which is
what it has on a CPU) on the same weights. Sides alternate call by call; medians. transformers cannot undo a rejected
draft's state: its verification is a forward and nothing else. Rows go to benchmarks/results/hybrid.jsonl.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.hybrid.model import save_random_hybrid
from benchmarks.records import quantiles, save_rows
from outrider.engine.model.load import load_model
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.batch import SessionRows, build_batch
from outrider.engine.run.runner import ModelRunner

# characters; fits the table when the output goes to a file
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
DTYPES = ("bfloat16", "float32")
BLOCK_SIZE = 16
NUM_WARM_UPS = 3
# rows of the log that a verification replays: the last committed token and two accepted draft tokens
NUM_REPLAYED = 3
# one call, from what was prepared by another, both untimed but for the call: returns the logits of its last row
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """num_rows new rows after context_len others."""

    name: str
    num_rows: int
    context_len: int


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
            ours, theirs = _Ours(str(path), dtype), _Theirs(str(path), dtype)
            for step in steps:
                row = {"dtype": dtype, "num_layers": layers, "hidden_size": hidden, "step": step.name}
                rows.append(row | _measure(step, ours, theirs, f"{dtype}, {step.name}", repeats))
    console.print(_table(rows))
    if save:
        console.print(f"rows appended to {save_rows('hybrid', rows)}")


def _token_ids(step: Step) -> list[int]:
    return [5 + position * 31 % 1000 for position in range(step.context_len + step.num_rows)]


class _Ours:
    """Slot 0 of the states holds the context, slot 1 is written by every timed call."""

    def __init__(self, path: str, dtype: str) -> None:
        self._loaded = load_model(path, dtype=dtype)

    def prepare(self, step: Step) -> Callable[[], Call]:
        token_ids = _token_ids(step)
        blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
        runner = ModelRunner(
            self._loaded, self._loaded.make_cache(len(blocks), BLOCK_SIZE), self._loaded.make_states(2), graphs=True
        )
        num_replayed = NUM_REPLAYED if step.num_rows > 1 else 1
        state = StateRows(None, (), 1, step.num_rows)
        if step.context_len:
            num_chain = step.context_len - num_replayed + 1
            context = StateRows(None, (), 0, num_chain)
            rows = SessionRows(token_ids[: step.context_len], 0, blocks, 0, state=context)
            runner.forward(build_batch([rows], BLOCK_SIZE))
            state = StateRows(0, range(num_replayed), 1, num_committed=1)
        num_logits = step.num_rows if step.context_len else 1
        rows = SessionRows(token_ids[step.context_len :], step.context_len, blocks, num_logits, state=state)
        return lambda: lambda: runner.forward(build_batch([rows], BLOCK_SIZE)).logits[-1]


class _Theirs:
    def __init__(self, path: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def prepare(self, step: Step) -> Callable[[], Call]:
        token_ids = torch.tensor([_token_ids(step)])
        positions = torch.arange(token_ids.shape[1])[None]
        cache: Any = None
        if step.context_len:
            with torch.inference_mode():
                cache = self._model(token_ids[:, : step.context_len], use_cache=True).past_key_values
        num_logits = step.num_rows if step.context_len else 1

        @torch.inference_mode()
        def forward(cached: Any) -> torch.Tensor:
            output = self._model(
                token_ids[:, step.context_len :],
                position_ids=positions[:, step.context_len :],
                past_key_values=cached,
                use_cache=True,
                logits_to_keep=num_logits,
            )
            logits: torch.Tensor = output.logits[0, -1]
            return logits

        def prepared() -> Call:
            # A call advances the recurrent states in place, and they cannot be cut back.
            cached = copy.deepcopy(cache)
            return lambda: forward(cached)

        return prepared


def _measure(step: Step, ours: _Ours, theirs: _Theirs, description: str, repeats: int) -> dict[str, Any]:
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
    table = Table(title=f"{first['num_layers']} layers, hidden size {first['hidden_size']}: median (minimum), ms")
    for column in ("dtype", "step", "rows", "ours", "transformers", "ours / transformers", "largest difference"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [row["ours_s"], row["transformers_s"]]
        table.add_row(
            *(row["dtype"], row["step"], str(row["num_rows"])),
            *(f"{taken['p50'] * 1e3:.2f} ({taken['min'] * 1e3:.2f})" for taken in times),
            f"{times[0]['p50'] / times[1]['p50']:.2f}",
            f"{row['largest_difference']:.1e}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
