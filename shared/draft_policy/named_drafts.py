"""Checkpoints for drafting, of which several of one kind have names: `code=FOLDER,chat=FOLDER`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_NAMED = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)


class NamedDraft(NamedTuple):
    """A checkpoint: a folder, .gguf file or Hub id. name: "" for the only one of its kind."""

    name: str
    path: str

    @classmethod
    def of(cls, entry: str) -> NamedDraft:
        """Reads FOLDER or NAME=FOLDER; a folder that is there is one, whatever its name has."""
        match = None if Path(entry).exists() else _NAMED.fullmatch(entry)
        return cls(match[1], match[2]) if match else cls("", entry)

    def __str__(self) -> str:
        return f"{self.name}={self.path}" if self.name else self.path


def are_told_apart(drafts: Sequence[NamedDraft]) -> bool:
    """Returns whether drafts of one kind can be served together: more than one need a name each."""
    names = {draft.name for draft in drafts}
    return len(drafts) == 1 or ("" not in names and len(names) == len(drafts))


def with_paths(entries: Iterable[str], resolve: Callable[[str], str]) -> tuple[str, ...]:
    """Returns the entries with their names, and each path replaced by resolve(path)."""
    drafts = map(NamedDraft.of, entries)
    return tuple(str(draft._replace(path=resolve(draft.path))) for draft in drafts)
