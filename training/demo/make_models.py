"""Makes the demo family from scratch: corpus, tokenizer, target, continuations, draft, evaluation, model cards.

Each step runs in its own process and leaves a stamp with its duration. Steps with a stamp are skipped; an interrupted
training continues from its last checkpoint. Run: `python -m outrider.training.demo.make_models --help`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.training.errors import TrainingError

# Mapping and unmapping large tensors in every step costs up to half of the time on CPU. glibc reads these variables at
# process start, so every step is its own process.
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}


@dataclass(frozen=True)
class Step:
    """One command: `python -m outrider.training.MODULE ARGUMENTS`."""

    name: str
    module: str
    arguments: tuple[str, ...]


def plan(work_dir: Path, models_dir: Path, resume_target: bool) -> list[Step]:
    """The steps in order, for these folders."""
    work, tokenizer = ("--work-dir", str(work_dir)), str(work_dir / "tokenizer")
    target, draft = str(models_dir / "demo-target"), str(models_dir / "demo-draft")
    resume = ("--resume",) if resume_target else ()
    figures = str(models_dir / "evaluation.json")
    pair = ("--target-dir", target)
    return [
        Step("corpus", "demo.corpus", work),
        Step("tokenizer", "demo.tokenizer", (*work, "--out", tokenizer)),
        Step("target", "demo.train_lm", (*work, "--out", target, "--tokenizer-dir", tokenizer, *resume)),
        Step("continuations", "demo.distill", (*work, *pair, "--out", draft, "--no-train")),
        Step("draft", "demo.distill", (*work, *pair, "--out", draft, "--no-sample")),
        Step("evaluation", "demo.evaluate", (*work, *pair, "--draft-dir", draft, "--out", figures)),
        Step("cards", "demo.model_cards", (*work, "--models-dir", str(models_dir))),
    ]


def run_step(step: Step, work_dir: Path, console: Console) -> None:
    """Runs one step and leaves its stamp. Raises TrainingError when the command fails."""
    command = [sys.executable, "-m", f"outrider.training.{step.module}", *step.arguments]
    console.rule(f"{step.name}: python -m outrider.training.{step.module} {' '.join(step.arguments)}", style="dim")
    started = time.monotonic()
    finished = subprocess.run(command, env=os.environ | MALLOC_ENVIRONMENT, check=False)
    if finished.returncode != 0:
        raise TrainingError(f"step {step.name} ended with status {finished.returncode}")
    seconds = time.monotonic() - started
    stamp = work_dir / f"{step.name}.done"
    stamp.write_text(json.dumps({"seconds": round(seconds, 1)}) + "\n", encoding="utf-8")
    console.print(f"[green]{step.name} done in {seconds / 60:.1f} min[/green]")


def run_steps(steps: list[Step], work_dir: Path, console: Console, *, force: bool, only: str) -> None:
    """Runs steps without a stamp; with `force` all, with `only` that step. Raises TrainingError."""
    work_dir.mkdir(parents=True, exist_ok=True)
    names = [step.name for step in steps]
    if only and only not in names:
        raise TrainingError(f"--only {only}: must be one of {', '.join(names)}")
    for step in steps:
        if (only and step.name != only) or (not only and not force and (work_dir / f"{step.name}.done").exists()):
            console.print(f"[dim]{step.name}: skipped[/dim]")
            continue
        run_step(step, work_dir, console)


def main(
    work_dir: Annotated[Path, typer.Option(help="corpus, checkpoints and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder for the finished models")] = Path("models"),
    force: Annotated[bool, typer.Option(help="repeat every step from the start")] = False,
    only: Annotated[str, typer.Option(help="repeat one step by name: corpus, target, draft, ...")] = "",
) -> None:
    """Make every model of the demo family; about an hour and a half on two cores.

    Examples:

      python -m outrider.training.demo.make_models

      python -m outrider.training.demo.make_models --only evaluation

      python -m outrider.training.demo.make_models --force --models-dir /tmp/models
    """
    resume_target = not force and (work_dir / "target.pt").exists()
    run_steps(plan(work_dir, models_dir, resume_target), work_dir, Console(), force=force, only=only)


if __name__ == "__main__":
    typer.run(main)
