"""`outrider certify MODEL` (or `python -m engine.certify MODEL`): does exact mode hold for this model here?

Exit code 0 when it holds, 1 when it does not, 2 when the model is refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.certificate import Certificate, certify
from engine.model import LoadedModel, load_model
from engine.runner import ModelRunner
from shared.errors import OutriderError

# Room for the certificate's own sequences; it makes small caches of the same shape.
_NUM_BLOCKS = 64
_BLOCK_SIZE = 16


def main(
    model: Annotated[str, typer.Argument(help="Folder of an HF checkpoint.")],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="0: every core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Prove row invariance on a loaded model, check by check.

    Example: outrider certify models/demo-target --dtype float32
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        with errors.status(f"loading and certifying {model}"):
            loaded = load_model(model, dtype=dtype, device=device, num_threads=threads or len(os.sched_getaffinity(0)))
            runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS, _BLOCK_SIZE))
            certificate = certify(loaded, runner)
    except OutriderError as error:
        errors.print(f"outrider: {error.message}", style="red", markup=False)
        raise typer.Exit(2) from None
    if as_json:
        console.print_json(json.dumps({"model": model, **asdict(certificate)}))
    else:
        _show(console, loaded, certificate)
    raise typer.Exit(0 if certificate.holds else 1)


def _show(console: Console, loaded: LoadedModel, certificate: Certificate) -> None:
    dtype = str(loaded.dtype).removeprefix("torch.")
    table = Table(title=f"{loaded.architecture}, {dtype}, {loaded.device}, {loaded.attention_ops.backend} attention")
    table.add_column("the same rows, computed")
    table.add_column("bits equal to the plain way")
    for check in certificate.checks:
        table.add_row(check.name, "yes" if check.holds else "NO")
    console.print(table)
    console.print(certificate.describe())


if __name__ == "__main__":
    typer.run(main)
