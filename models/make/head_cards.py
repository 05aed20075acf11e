"""Writes the demo heads' model cards from measured figures.

Reads `heads-evaluation.json`, each run's `run.json` and log, and the durations of the steps.
Run: `python -m models.make.head_cards --help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from models.make.make_heads import HEADS, data_files
from outrider.training.errors import CorpusError

CARD = """# demo-{name}

{what} for `demo-target`, {megabytes:.1f} MB in bf16. Only good for drafting for that one model.

## Training
`outrider train train --method {method}`: {steps} steps of {batch_size} windows of up to {seq_len} tokens \
({epochs:.1f} epochs) on CPU, {minutes:.0f} minutes. Three quarters of the windows are text that the target wrote \
itself after training prompts (half greedy or nearly so, half at temperatures 0.8 to 1), the rest is corpus text. \
Labels are the target's whole law. Its own options: {options}.

## Evaluation
Along the target's own continuations of held-out prompts ({positions:,} positions at the first draft position, hardly \
fewer after it), given that the tokens before were right; weights as shipped, computed with in float32:

| draft position | temperature 0: argmaxes agree | temperature 1: 1 - total variation |
|---|---|---|
{rows}

## Format
{layout}. Made again by `python -m models.make.make_heads`. Data, licences and limits are those of
`demo-target`.
"""
WHAT = {
    "eagle3": ("An EAGLE-3 head", "The speculators format, which vLLM recognises; the target's embedding is not in it"),
    "eagle": ("An EAGLE-1 head", "SafeAILab's EAGLE-1 layout; the target's embedding and output head are not in it"),
    "medusa": ("Medusa heads", "vLLM's Medusa layout with `original_lm_head`, which holds the target's output head"),
    "mlp-speculator": ("An MLP speculator", "IBM's MLP speculator layout with tied weights"),
}


def _read(path: Path) -> Any:
    if not path.exists():
        raise CorpusError(f"{path} is missing: run the earlier steps of `python -m models.make.make_heads` first")
    return json.loads(path.read_text(encoding="utf-8"))


def card_text(name: str, options: tuple[str, ...], work_dir: Path, models_dir: Path) -> str:
    """Returns one head's card. Raises CorpusError when a step has not been run."""
    figures = _read(models_dir / "heads-evaluation.json")[f"demo-{name}"]
    run_dir = work_dir / "heads" / name
    settings, log = _read(run_dir / "run.json"), (run_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()
    steps, optimization = json.loads(log[-1])["step"], settings["optimization"]
    batch_size = optimization["batch_size"] * optimization["accumulation"]
    num_rows = sum(len(np.load(path, mmap_mode="r")) for path in data_files(work_dir))
    columns = (figures["temperature_0"]["agreement"], figures["temperature_1"]["overlap"])
    rows = [
        f"| {position} | {cold:.3f} | {warm:.3f} |"
        for position, (cold, warm) in enumerate(zip(*columns, strict=True), 1)
    ]
    return CARD.format(
        name=name,
        what=WHAT[name][0],
        layout=WHAT[name][1],
        megabytes=figures["bytes"] / 1e6,
        method=figures["method"],
        steps=steps,
        batch_size=batch_size,
        seq_len=settings["seq_len"],
        epochs=steps * batch_size / num_rows,
        minutes=_read(work_dir / f"heads-{name}.done")["seconds"] / 60,
        options=f"`{' '.join(options)}`",
        positions=figures["temperature_0"]["positions"],
        rows="\n".join(rows),
    )


def main(
    work_dir: Annotated[Path, typer.Option(help="runs and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder of the heads and heads-evaluation.json")] = Path("models"),
) -> None:
    """Write the README.md of every existing demo head.

    Example: python -m models.make.head_cards
    """
    for head in HEADS:
        model_dir = models_dir / f"demo-{head.name}"
        if not model_dir.is_dir():
            typer.echo(f"{model_dir} does not exist: no card")
            continue
        text = card_text(head.name, head.options, work_dir, models_dir)
        (model_dir / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
