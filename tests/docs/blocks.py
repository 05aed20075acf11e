"""What the documentation shows as commands: fenced blocks with the note that says how each is checked, inline commands
and flags. Not here: the checks.

The note is an HTML comment on the line before the fence; it is not on the site:

    <!-- check: stack -->            starts the stack that the other blocks use
    <!-- check: run -->              run against that stack, must succeed
    <!-- check: options -->          not run (it needs other models, a cluster, hours): its programs, targets, options
                                     and files must exist
    <!-- check: not ours, WHY -->    a command of somebody else's
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages of the site that lie outside docs/, whose readers see them as they are: checked without a note.
_DEFAULT_CHECKS = {"deploy/kubernetes/README.md": "options", "CONTRIBUTING.md": "options"}
# Fences of these languages show no command.
NO_COMMANDS = ("text", "json", "yaml", "lua")
_CHECK = re.compile(r"<!-- check: (.+) -->")
_FENCE = re.compile(r"( *)```(\w*)")
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    path: str
    line: int
    language: str
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def pages() -> list[Path]:
    """README, docs/ and the other files that are pages of the site."""
    return [ROOT / "README.md", *(ROOT / name for name in _DEFAULT_CHECKS), *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[Block]:
    return [block for page in pages() for block in page_blocks(page.relative_to(ROOT).as_posix(), page.read_text())]


def page_blocks(path: str, markdown: str) -> Iterator[Block]:
    lines = markdown.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        note = _CHECK.fullmatch(lines[number - 2].strip()) if number > 1 else None
        first, end = number, next(n for n in range(number, len(lines)) if lines[n].strip() == "```")
        text = "\n".join(line.removeprefix(fence.group(1)) for line in lines[first:end])
        default = "" if fence.group(2) in NO_COMMANDS else _DEFAULT_CHECKS.get(path, "")
        yield Block(path, first, fence.group(2), note.group(1) if note else default, text)
        number = end + 1


def inline_code(path: Path) -> Iterator[str]:
    """Of the prose, tables included. On the pages for users of other servers, only the columns that are ours."""
    prose = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in prose.splitlines():
        if path.name.startswith("coming-from-"):
            if not line.startswith("|"):
                continue
            line = line.split("|", 2)[2]
        yield from _INLINE.findall(line)
