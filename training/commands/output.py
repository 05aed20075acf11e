"""Output of the `outrider train` commands: the result on standard output; with --json all else on standard error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead; progress to standard error.")]


def progress_console(*, as_json: bool) -> Console:
    return Console(stderr=as_json, highlight=False)


def print_result(words: str, values: Mapping[str, Any], *, as_json: bool) -> None:
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps(values))
    else:
        console.print(words, markup=False, soft_wrap=True)
