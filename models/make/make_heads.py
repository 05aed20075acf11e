"""Makes the demo target's draft heads: its own text, four trainings, export and figures.

Each step runs in its own process and leaves a stamp. Steps with a stamp are skipped; an interrupted training continues
from its last checkpoint. Needs the work folder of `models.make.make_models`.
Run: `python -m models.make.make_heads --help`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from models.make.head_samples import HELD_OUT_FILES
from models.make.steps import Step, repeated, run_steps

TARGET_NAME = "demo-target"


@dataclass(frozen=True)
class HeadPlan:
    """One head: its folder is `demo-NAME`, its method the name with underscores."""

    name: str
    options: tuple[str, ...]

    @property
    def method(self) -> str:
        return self.name.replace("-", "_")


# Sizes are limited by git (5 MB each), durations were chosen; results are in docs/models.md.
HEADS = (
    HeadPlan(
        "eagle3",
        (
            *("--steps", "800", "--lr", "2e-3", "--ttt-steps", "3", "--draft-vocab-size", "3072"),
            *("--intermediate-size", "512", "--no-save-embedding"),
            *("--feature-layer", "1", "--feature-layer", "3", "--feature-layer", "5"),
        ),
    ),
    HeadPlan("medusa", ("--steps", "1200", "--lr", "1e-2", "--num-heads", "4", "--num-layers", "2")),
    HeadPlan("mlp-speculator", ("--steps", "900", "--lr", "2e-2", "--num-heads", "4", "--inner-dim", "256")),
    HeadPlan(
        "eagle",
        (
            *("--steps", "700", "--lr", "4e-3", "--optimizer", "muon", "--ttt-steps", "3", "--law-weight", "1"),
            "--no-save-embedding",
        ),
    ),
)


def plan(work_dir: Path, models_dir: Path) -> list[Step]:
    """Returns the steps in order, for these folders."""
    samples, target = work_dir / "heads", models_dir / TARGET_NAME
    steps = [
        Step(
            "heads-samples",
            "models.make.head_samples",
            ("--work-dir", str(work_dir), "--target-dir", str(target), "--out-dir", str(samples)),
        )
    ]
    # the target's own text, old and new, and some of the corpus
    data = (work_dir / "continuations.npy", samples / "own.npy", samples / "corpus.npy")
    for head in HEADS:
        run_dir, model_dir = samples / head.name, models_dir / f"demo-{head.name}"
        fixed = ("--method", head.method, "--target", str(target), "--target-name", TARGET_NAME)
        train = (
            *("train", *fixed, "--output", str(run_dir), "--resume", "--seq-len", "256"),
            *repeated("--data", data),
            *repeated("--eval-data", [samples / name for name in HELD_OUT_FILES.values()]),
            *("--batch-size", "8", "--warmup-steps", "30", "--eval-every", "100", "--checkpoint-every", "25"),
            *head.options,
        )
        export = ("export", "--run", str(run_dir), "--target", str(target), "--target-name", TARGET_NAME)
        steps.append(Step(f"heads-{head.name}", "outrider.training", train))
        steps.append(Step(f"heads-{head.name}-export", "outrider.training", (*export, "--output", str(model_dir))))
    names = repeated("--head", ["demo-draft", *(f"demo-{head.name}" for head in HEADS)])
    figures = ("--models-dir", str(models_dir), "--samples-dir", str(samples), *names)
    return [*steps, Step("heads-agreement", "models.make.agreement", figures)]


def main(
    work_dir: Annotated[Path, typer.Option(help="corpus, samples, runs and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder of the target and the heads")] = Path("models"),
    force: Annotated[bool, typer.Option(help="repeat every step")] = False,
    only: Annotated[str, typer.Option(help="repeat one step by name: heads-eagle3, ...")] = "",
) -> None:
    """Make the demo heads; a few hours on two cores.

    Examples:

      python -m models.make.make_heads

      nice python -m models.make.make_heads --only heads-eagle3
    """
    run_steps(plan(work_dir, models_dir), work_dir, Console(), force=force, only=only)


if __name__ == "__main__":
    typer.run(main)
