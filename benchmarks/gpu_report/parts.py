"""The parts of the report by section, in the order in which they run. A section's module is imported only for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from importlib import import_module

from benchmarks.gpu_report.report import Finding, Part, Run

SECTIONS = (
    "correctness",
    "certificate",
    "grid",
    "linear",
    "attention",
    "sampling",
    "step",
    "draft",
    "draft_head",
    "speculation",
)


def parts_of(wanted: Collection[str]) -> list[Part]:
    """Every section's module has `PARTS`; one that cannot be imported becomes a part that fails."""
    parts: list[Part] = []
    for section in SECTIONS:
        if section in wanted:
            try:
                parts += import_module(f"benchmarks.gpu_report.{section}").PARTS
            except Exception as error:  # a library that is missing here, or too old for a kernel
                parts.append(Part(section, "import", 0.0, _raising(error)))
    return parts


def _raising(error: Exception) -> Callable[[Run], Iterable[Finding]]:
    def measure(_run: Run) -> Iterable[Finding]:
        raise error

    return measure
