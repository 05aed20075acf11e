"""Tokens per second of the demo hybrid's drafters: `python -m benchmarks.hybrid.methods`.

One stream through the whole stack, bf16, drafts made in the verifier, each variant in turn; figures are medians
over rounds, and go to `hybrid-evaluation.json` next to those of models.make.hybrid_rounds. The model is tiny, so a
forward's fixed cost weighs as nowhere else: not what a hybrid of a useful size gains.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.screen import console, say
from benchmarks.variants import measure
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack

METHODS = ("mtp", "eagle3", "ngram")
DRAFT_LENS = (1, 3, 5)


def _variants() -> dict[str, dict[str, Any]]:
    drafted = {
        f"{method} {length}": {"method": method, "num_speculative_tokens": length}
        for method in METHODS
        for length in DRAFT_LENS
    }
    auto = {"method": "auto", "num_speculative_tokens": max(DRAFT_LENS)}
    return {"off": {"method": "off", "num_speculative_tokens": 1}, **drafted, "auto": auto}


def main(
    models: Annotated[Path, typer.Option(help="Folder of demo-hybrid and its head.")] = Path("models"),
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 192,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them.")] = 5,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; 0 and 1 if absent.")] = None,
    save: Annotated[bool, typer.Option(help="Write the figures into hybrid-evaluation.json.")] = True,
) -> None:
    """Example: python -m benchmarks.hybrid.methods --rounds 3"""
    with tempfile.TemporaryDirectory() as folder:
        settings = StackSettings(
            model=str(models / "demo-hybrid"),
            draft_model=str(models / "demo-hybrid-eagle3"),
            methods=METHODS,
            port=0,
            grpc_port=-1,
            num_drafters=0,
        )
        stack = Stack(settings, Path(folder), say, in_foreground=True)
        degrees = temperature or [0.0, 1.0]
        figures = measure(stack, _variants(), degrees, max_tokens=max_tokens, rounds=rounds)
    if save:
        path = models / "hybrid-evaluation.json"
        served = {f"temperature_{degree:g}": rows for degree, rows in figures.items()}
        known = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**known, "served": served}, indent=1) + "\n", encoding="utf-8")
        console.print(f"figures written to {path}")


if __name__ == "__main__":
    typer.run(main)
