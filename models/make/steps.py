"""Runs the steps that make models: each in its own process, with a stamp by which it is skipped the next time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from outrider.training.errors import TrainingError


@dataclass(frozen=True)
class Step:
    """One command: `python -m MODULE ARGUMENTS`."""

    name: str
    module: str
    arguments: tuple[str, ...]


def run_step(step: Step, work_dir: Path, console: Console) -> None:
    """Runs one step and leaves its stamp. Raises TrainingError when the command fails."""
    command = [sys.executable, "-m", step.module, *step.arguments]
    console.rule(f"{step.name}: python -m {step.module} {' '.join(step.arguments)}", style="dim")
    started = time.monotonic()
    finished = subprocess.run(command, check=False)
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


def repeated(option: str, values: Iterable[Path | str]) -> list[str]:
    """Returns the arguments of an option that may be repeated."""
    return [argument for value in values for argument in (option, str(value))]
