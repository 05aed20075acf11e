"""`python -m tests.attacks`: exit code 1 when a plain stream is refused, changed or delayed beyond 2 x."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from tests.attacks.holding import NUM_INNOCENTS, HoldOutcome, run_holds
from tests.attacks.run import NUM_STREAMS, Outcome, run_attacks
from tests.attacks.stack import running_stack

# ratio; how much slower the slowest plain stream may be than alone; what its owner would not yet call broken
MAX_SLOWDOWN = 2.0
_console = Console(width=140)


def main(drafters: int = 1) -> None:
    """One client's attacks beside eight plain streams of others, then those that hold places, beside short requests.
    Needs a quiet machine: it measures times.
    """
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running_stack(Path(folder), num_drafters=drafters) as stack,
    ):
        outcomes = asyncio.run(run_attacks(stack, _console.print))
        holds = asyncio.run(run_holds(stack, _console.print))
    _show(outcomes)
    _show_holds(holds)
    has_hurt = any(outcome.has_hurt or outcome.slowdown > MAX_SLOWDOWN for outcome in outcomes)
    sys.exit(has_hurt or any(outcome.refused for outcome in holds))


def _show_holds(outcomes: list[HoldOutcome]) -> None:
    table = Table("held by the attacker", f"of {2 * NUM_INNOCENTS} requests", "p50", "slowest", "attackers")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            f"{outcome.refused.total()} refused",
            f"{outcome.p50_s:.3f} s",
            f"{outcome.slowest_s:.3f} s",
            ", ".join(f"{count} x {what}" for what, count in sorted(outcome.attackers.items())),
        )
    _console.print(table)


def _show(outcomes: list[Outcome]) -> None:
    table = Table("attack", f"{NUM_STREAMS} streams failed", "changed", "slower", "60 after it", "gateway", "attackers")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            str(len(outcome.failures)),
            str(outcome.num_changed),
            f"{outcome.slowdown:.2f} x",
            f"{outcome.refused_afterwards} refused",
            f"{outcome.gateway_peak_bytes / 2**20:.0f} MiB",
            ", ".join(f"{count} x {status}" for status, count in sorted(outcome.attackers.items())),
        )
    _console.print(table)
    for outcome in outcomes:
        for failure in outcome.failures:
            _console.print(f"{outcome.name}: {failure}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
