"""llms.txt (a list of the pages, one line each) and llms-full.txt (all of them in one file), as llmstxt.org has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_HEAD = """# Outrider

> Lossless speculative decoding for LLM serving, as separate gRPC services behind the OpenAI API. A drafter guesses
> tokens, a verifier with the target model checks them in one forward pass; the output never depends on the guesses.
"""


def index_text(nav: Sequence[Any], sources: Mapping[str, str]) -> str:
    lines = [_HEAD]
    for section, pages in _sections(nav):
        lines.append(f"## {section}\n")
        for title, name in pages:
            headings = _headings(sources[name])
            lines.append(f"- [{title}]({name.removesuffix('.md')}.html)" + (f": {headings}" if headings else ""))
        lines.append("")
    return "\n".join(lines)


def full_text(nav: Sequence[Any], sources: Mapping[str, str]) -> str:
    return "\n\n".join([_HEAD, *(sources[name] for _, pages in _sections(nav) for _, name in pages)])


def _sections(nav: Sequence[Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for entry in nav:
        for title, value in entry.items():
            if isinstance(value, str):
                yield title, [(title, value)]
            else:
                yield title, [page for child in value for page in child.items()]


def _headings(markdown: str) -> str:
    """Returns the headings of the sections, which say what a page is about."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return "; ".join(re.findall(r"^## (.+)", prose, flags=re.MULTILINE))
