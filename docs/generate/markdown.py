"""Small pieces of Markdown: escaped cells, tables. Not a renderer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def code(text: object) -> str:
    """Inline code that holds in a table cell."""
    shown = str(text).replace("|", "\\|")
    return f"`{shown}`" if shown else ""


def cell(text: object) -> str:
    """Prose of the program's own help texts: nothing in it is markup."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
