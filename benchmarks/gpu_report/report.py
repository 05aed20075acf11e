"""The books of a report: parts run one after another within a budget, and whatever one of them does the next one runs.

Not here: what is measured (the other modules of the package).
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PASS, MISS, FAILED, SKIPPED, INFO = "pass", "MISS", "FAILED", "skipped", ""


@dataclass(frozen=True)
class Finding:
    """One line of the table. `figures` go to the JSON row alone."""

    name: str
    target: str
    measured: str
    verdict: str
    figures: dict[str, Any] = field(default_factory=dict)


def judged(name: str, target: str, measured: str, holds: bool, **figures: Any) -> Finding:
    """A finding that has a target."""
    return Finding(name, target, measured, PASS if holds else MISS, figures)


def noted(name: str, measured: str, **figures: Any) -> Finding:
    """A finding without a target."""
    return Finding(name, "", measured, INFO, figures)


class Budget:
    """Seconds since it was made."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end - self._clock()


@dataclass(frozen=True)
class Run:
    """The settings of a part. `tiny`: sizes that triton's interpreter can bear; `quick`: fewer repeats and cells."""

    device: torch.device
    budget: Budget
    tiny: bool = False
    quick: bool = False
    say: Callable[[str], None] = print


@dataclass(frozen=True)
class Part:
    """`measure` may yield findings one by one: those before an exception count. Skipped with less than needs_s left."""

    section: str
    name: str
    needs_s: float
    measure: Callable[[Run], Iterable[Finding]]


@dataclass(frozen=True)
class Line:
    section: str
    finding: Finding
    seconds: float


def run_parts(parts: Sequence[Part], run: Run, log: Callable[[str], object]) -> list[Line]:
    """All parts in order. An exception becomes a finding with its last line; `log` gets the traceback."""
    lines: list[Line] = []
    for part in parts:
        started = time.perf_counter()

        def add(finding: Finding, part: Part = part, started: float = started) -> None:
            lines.append(Line(part.section, finding, time.perf_counter() - started))
            run.say(f"{part.section}: {finding.name}: {finding.measured} {finding.verdict}".rstrip())

        if run.budget.left_s < part.needs_s:
            left = f"needs about {part.needs_s:.0f} s, {max(0.0, run.budget.left_s):.0f} s are left"
            add(Finding(part.name, "", left, SKIPPED))
            continue
        try:
            for finding in part.measure(run):
                add(finding)
        except Exception as error:
            log(f"{part.section}: {part.name}\n{traceback.format_exc()}\n")
            add(Finding(part.name, "", last_line(error), FAILED))
    return lines


def last_line(error: BaseException) -> str:
    """The exception as the last line of a traceback shows it, cut to a table's width."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return (text[-1] if text else type(error).__name__)[:160]


def is_sound(lines: Sequence[Line]) -> bool:
    """Whether nothing failed and no target was missed; what was skipped is not held against anybody."""
    return all(line.finding.verdict not in (FAILED, MISS) for line in lines)


def table(lines: Sequence[Line], title: str) -> Table:
    made = Table(title=title)
    for column in ("section", "what", "target", "measured", "verdict"):
        made.add_column(column, overflow="fold")
    styles = {PASS: "green", MISS: "bold red", FAILED: "bold red", SKIPPED: "yellow", INFO: ""}
    shown = ""
    for line in lines:
        finding = line.finding
        cells = ("" if line.section == shown else line.section, finding.name, finding.target, finding.measured)
        style = styles[finding.verdict]
        verdict = f"[{style}]{finding.verdict}[/]" if style else finding.verdict
        made.add_row(*(escape(cell) for cell in cells), verdict, end_section=False)
        shown = line.section
    return made


def show(lines: Sequence[Line], title: str, console: Console) -> None:
    console.print(table(lines, title))
    counts = Counter(line.finding.verdict for line in lines)
    met = f"{counts[PASS]} targets met, {counts[MISS]} missed"
    console.print(f"{met}, {counts[FAILED]} parts failed, {counts[SKIPPED]} skipped")
