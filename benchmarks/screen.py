"""Prints what the benchmarks say: steps, and tables of figures."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

# characters; the widest table, where the output goes to a file
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def say(message: str) -> None:
    console.print(f"==> {message}", markup=False)


def table(*columns: str, title: str | None = None, num_names: int = 1) -> Table:
    """Returns an empty table. The first num_names columns are names; the others are figures, aligned to the right."""
    made = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < num_names else "right")
    return made
