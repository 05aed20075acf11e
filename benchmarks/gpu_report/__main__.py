"""`python -m benchmarks.gpu_report`: runs the sections and ends with one table. Exit code 2: no CUDA device.

Code 1: a part failed or a target was missed. The tracebacks are in the log file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu_report.parts import SECTIONS, parts_of

RESULTS = Path(__file__).parents[1] / "results" / "gpu.jsonl"
LOG = Path(".run") / "gpu-report.log"
_WIDTH = 150


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(SECTIONS)}; all if absent.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, cells and prompts.")] = False,
    budget_s: Annotated[float, typer.Option(help="What no longer fits into these seconds is skipped.")] = 450.0,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="No GPU: correctness alone, tiny, by triton's interpreter.")
    ] = False,
    results: Annotated[Path, typer.Option(help="File that the rows are appended to.")] = RESULTS,
    save: Annotated[bool, typer.Option(help="Whether they are.")] = True,
    log: Annotated[Path, typer.Option(help="Tracebacks of what failed.")] = LOG,
    commit: Annotated[str, typer.Option(help="Written into the rows; asked of git if empty.")] = "",
) -> None:
    """Everything that a GPU can show: correctness, certificate, exact-mode grid, timings.

    Example: python -m benchmarks.gpu_report --only linear --only step --budget-s 120
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    wanted = only or (["correctness"] if interpret else list(SECTIONS))
    for name in wanted:
        if name not in SECTIONS:
            raise typer.BadParameter(f"--only {name}: must be one of {', '.join(SECTIONS)}")
    if interpret:
        if wanted != ["correctness"]:
            raise typer.BadParameter("--interpret runs the correctness section alone")
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which reads it then
    else:
        _require_cuda()

    import torch

    from benchmarks.gpu_report.report import Budget, Run, is_sound, run_parts, show
    from benchmarks.gpu_report.rows import provenance, save_rows

    device = torch.device("cpu" if interpret else "cuda")
    run = Run(device, Budget(budget_s), tiny=interpret, quick=quick, say=lambda text: console.print(text, markup=False))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as tracebacks:
        lines = run_parts(parts_of(wanted), run, tracebacks.write)
    common = provenance(device, commit)
    if save and not interpret:
        save_rows(results, lines, common)
        console.print(f"rows appended to {results}, tracebacks in {log}", markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in common["versions"].items())
    show(lines, f"{common['device']}, {versions}, commit {common['commit'] or 'unknown'}", console)
    raise typer.Exit(0 if is_sound(lines) else 1)


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        typer.echo(
            "no CUDA device: this torch sees none. --interpret checks the kernels on the CPU, at tiny sizes.", err=True
        )
        raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
