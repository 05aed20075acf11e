"""The parts of the simulation by themselves: simulated time, shared cores, the verifier's patience."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from benchmarks.simulation.events import Events, OwnMachine, SharedMachine
from outrider.verifier_service.timing.gathering import BatchGathering
from outrider.verifier_service.timing.step_costs import StepCosts


def test_things_happen_in_order_of_time_then_of_asking() -> None:
    events, seen = Events(), []
    for delay_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        events.after(delay_s, lambda name=name: seen.append((events.now, name)))
    events.run(until_s=1.5)
    assert seen == [(1.0, "first"), (1.0, "second")]
    events.run()
    assert seen[-1] == (2.0, "late")


def test_work_on_one_machine_shares_it_evenly() -> None:
    """1 s and 3 s from 0, 1 s from 1: served alone until 0, by halves until 1, by thirds until the first has 0.5 left
    done at 2.5, by halves until the second newcomer's 0.5 are done at 3.5, the rest of the long one alone at 5.
    """
    events, ended = Events(), {}
    machine = SharedMachine(events)

    def begin(name: str, work_s: float) -> None:
        machine.run(work_s, lambda: ended.__setitem__(name, events.now))

    begin("short", 1.0)
    begin("long", 3.0)
    events.after(1.0, begin, "newcomer", 1.0)
    events.run()
    assert ended == {
        "short": pytest.approx(2.5),
        "newcomer": pytest.approx(3.5),
        "long": pytest.approx(5.0),
    }


def test_a_machine_of_its_own_is_not_shared() -> None:
    events, ended = Events(), []
    machine = OwnMachine(events)
    for work_s in (1.0, 3.0):
        machine.run(work_s, lambda: ended.append(events.now))
    events.run()
    assert ended == [1.0, 3.0]


def test_pace_reads_the_time_it_is_given() -> None:
    """One that is away for another 3 ms is waited for when the simulated time says so, whatever the real one is."""
    events = Events()
    events.after(7.0, lambda: None)
    events.run()
    here, away = _Session(object(), None, None), _Session(None, 6.999, 0.002)
    for clock, is_waited_for in ((lambda: events.now, True), (time.perf_counter, False)):
        gathering = BatchGathering(StepCosts([(1, 0.02), (64, 0.05)]), clock)
        gathering.observe([], 1, 6.9, 6.98)
        assert (0.0 < gathering.patience_s([here, away]) < 0.003) == is_waited_for  # type: ignore[list-item]


@dataclass
class _Session:
    step: object | None
    replied_at: float | None
    return_s: float | None
    num_wanted_rows: int = 1
