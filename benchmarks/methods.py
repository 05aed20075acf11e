"""The gain of each draft method on a target of realistic cost: `python -m benchmarks.methods`.

The demo target and its heads are expanded together (models/make/expand.py, models/make/expand_heads.py): acceptance
is the demo family's, costs are those of a 158 M target and heads of its width. One stream through the whole stack, each
method in turn, at temperature 0 and at 1 in exact mode; figures are medians over rounds. Rows go to
benchmarks/results/methods.jsonl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.records import save_rows
from benchmarks.screen import console, say
from benchmarks.simulation.stack import expanded_target
from benchmarks.variants import measure
from models.make.expand_heads import expand_head
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack

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
    with expanded_target(models / "demo-target", say) as target:
        drafts = [str(models / "demo-draft")]
        for name in HEADS:
            expand_head(models / f"demo-{name}", models / "demo-target", target, target.with_name(name))
            drafts.append(str(target.with_name(name)))
        settings = StackSettings(model=str(target), draft_model=",".join(drafts), port=0, grpc_port=-1)
        stack = Stack(settings, target.parent, say, in_foreground=True)
        degrees = temperature or [0.0, 1.0]
        figures = measure(stack, _variants(), degrees, max_tokens=max_tokens, rounds=rounds)
    if save:
        rows = [
            {"variant": name, "temperature": degree, **row}
            for degree, found in figures.items()
            for name, row in found.items()
        ]
        console.print(f"rows appended to {save_rows('methods', rows)}")


def _variants() -> dict[str, dict[str, Any]]:
    chains = {name: {"method": name, "num_speculative_tokens": CHAIN} for name in ("off", *METHODS)}
    trees = {
        f"{name}, tree of {TREE}": {"method": name, "num_speculative_tokens": TREE, "token_tree": True}
        for name in _TREES
    }
    return {**chains, **trees}


if __name__ == "__main__":
    typer.run(main)
