"""Hypothesis over one target: so many inputs, in rounds with seeds of their own; a round that fails is a finding.

Not here: what the inputs are and what may come of them (the targets).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.fuzz.tally import Tally

Input = TypeVar("Input")
# Hypothesis remembers all that a round has tried: rounds of this size stay small in memory.
_ROUND = 2_000
# No parser takes seconds; on a machine that is busy otherwise everything takes longer.
SLOW_S = 20.0


@dataclass(frozen=True)
class Target(Generic[Input]):
    """`check` sends what hypothesis drew and returns what came of it, a word for each of `num_at_once` inputs.

    Whatever it raises is a finding.
    """

    name: str
    inputs: SearchStrategy[Input]
    check: Callable[[Input], Sequence[str]]
    num_at_once: int = 1
    after_round: Callable[[], None] = lambda: None


def run_target(target: Target[Input], num_inputs: int, first_seed: int, tally: Tally) -> None:
    for number, start in enumerate(range(0, num_inputs, _ROUND)):
        try:
            num_draws = -(-min(_ROUND, num_inputs - start) // target.num_at_once)
            _round(target, num_draws, first_seed + number, tally)
            target.after_round()
        except Exception as error:
            tally.findings.append(f"{target.name}: {_told(error)}")


def _told(error: BaseException) -> str:
    """With its input. What came once and not again (flaky) is told as what it was the first time."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_told, error.exceptions))
    notes = " ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error} {notes}"[:1500]


def _round(target: Target[Input], num_draws: int, round_seed: int, tally: Tally) -> None:
    @seed(round_seed)
    @settings(
        max_examples=num_draws,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def try_one(one: Input) -> None:
        started = time.monotonic()
        try:
            outcomes = target.check(one)
        except Exception as error:
            tally.count(target.name, ("FINDING",), time.monotonic() - started)
            error.add_note(f"input: {one!r}"[:1000])
            raise
        seconds = time.monotonic() - started
        tally.count(target.name, outcomes, seconds)
        if seconds > SLOW_S:
            tally.findings.append(f"{target.name}: {seconds:.0f} s for {one!r}"[:1000])

    try_one()
