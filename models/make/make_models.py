"""Makes the demo family from scratch: corpus, tokenizer, target, draft, hybrid, and their evaluation.

Each step runs in its own process and leaves a stamp with its duration. Steps with a stamp are skipped; an interrupted
training continues from its last checkpoint. Run: `python -m models.make.make_models --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from models.make.make_hybrid import hybrid_steps
from models.make.steps import Step, run_steps


def plan(work_dir: Path, models_dir: Path, *, resume_target: bool, resume_hybrid: bool) -> list[Step]:
    """Returns the steps in order, for these folders."""
    work, tokenizer = ("--work-dir", str(work_dir)), str(work_dir / "tokenizer")
    target, draft = str(models_dir / "demo-target"), str(models_dir / "demo-draft")
    resume = ("--resume",) if resume_target else ()
    figures = str(models_dir / "evaluation.json")
    pair = ("--target-dir", target)
    return [
        Step("corpus", "models.make.corpus", work),
        Step("tokenizer", "models.make.tokenizer", (*work, "--out", tokenizer)),
        Step("target", "models.make.train_lm", (*work, "--out", target, "--tokenizer-dir", tokenizer, *resume)),
        Step("continuations", "models.make.distill", (*work, *pair, "--out", draft, "--no-train")),
        Step("draft", "models.make.distill", (*work, *pair, "--out", draft, "--no-sample")),
        Step("evaluation", "models.make.evaluate", (*work, *pair, "--draft-dir", draft, "--out", figures)),
        *hybrid_steps(work_dir, models_dir, resume_hybrid),
    ]


def main(
    work_dir: Annotated[Path, typer.Option(help="corpus, checkpoints and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder for the finished models")] = Path("models"),
    force: Annotated[bool, typer.Option(help="repeat every step from the start")] = False,
    only: Annotated[str, typer.Option(help="repeat one step by name: corpus, target, draft, ...")] = "",
) -> None:
    """Make every model of the demo family; about two hours on two cores.

    Examples:

      python -m models.make.make_models

      python -m models.make.make_models --only evaluation

      python -m models.make.make_models --force --models-dir /tmp/models
    """
    resume_target, resume_hybrid = (not force and (work_dir / f"{name}.pt").exists() for name in ("target", "hybrid"))
    steps = plan(work_dir, models_dir, resume_target=resume_target, resume_hybrid=resume_hybrid)
    run_steps(steps, work_dir, Console(), force=force, only=only)


if __name__ == "__main__":
    typer.run(main)
