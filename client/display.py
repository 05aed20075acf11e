"""A speculative stream in the terminal: colour and text style mark what became of each draft token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from outrider.client.generate import StreamedToken, StreamEnd

_Item: TypeAlias = StreamedToken | StreamEnd
_STYLES = {
    "accepted": "green underline",
    "corrected": "yellow bold",
    "bonus": "cyan italic",
    "target": "",
}
LEGEND = Text.assemble(
    ("accepted draft", _STYLES["accepted"]),
    "  ",
    ("corrected", _STYLES["corrected"]),
    "  ",
    ("bonus", _STYLES["bonus"]),
    "  plain: the target alone",
)


@dataclass
class StreamFigures:
    num_tokens: int = 0
    seconds: float = 0.0
    first_token_s: float = 0.0
    end: StreamEnd | None = None


def announced(stream: Iterable[_Item], announce: Callable[[], None]) -> Iterator[_Item]:
    """Yields the stream's items and calls `announce` once, before the first.

    What it prints is therefore never followed by a failure to connect.
    """
    for number, item in enumerate(stream):
        if number == 0:
            announce()
        yield item


def show_stream(console: Console, stream: Iterable[_Item], clock: Callable[[], float]) -> StreamFigures:
    """Prints tokens as they arrive; returns the stream's figures."""
    figures = StreamFigures()
    started = clock()
    for item in stream:
        if isinstance(item, StreamEnd):
            figures.end = item
            figures.num_tokens = item.completion_tokens
            continue
        if figures.num_tokens == 0:
            figures.first_token_s = clock() - started
        figures.num_tokens += 1
        console.print(Text(item.text, style=_STYLES[item.origin]), end="", soft_wrap=True)
    figures.seconds = clock() - started
    console.print()
    return figures


def summary(figures: StreamFigures) -> str:
    rate = figures.num_tokens / figures.seconds if figures.seconds else 0.0
    parts = [f"{figures.num_tokens} tokens, {rate:.0f} tokens/s, first after {figures.first_token_s * 1e3:.0f} ms"]
    end = figures.end
    if end is not None and end.num_spec_steps:
        share = end.num_accepted_draft_tokens / end.num_draft_tokens
        parts.append(
            f"{end.num_spec_steps} drafts, {end.num_accepted_draft_tokens} of {end.num_draft_tokens} draft tokens "
            f"accepted ({share:.0%}), {end.mean_acceptance_length:.2f} tokens per round"
        )
    return "; ".join(parts)
