"""Threads of a program: nobody waits for one that is held up, and what that one does late harms nobody."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
from llvmlite import binding
from numba import carray, njit

from outrider.kernels.cpu.program import stepping
from outrider.kernels.cpu.program.program import Program, Step, joined, last_conflicts, step_of
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import load_i64, next_ticket, store_i64
from outrider.kernels.cpu.team import Work, compile_unit

LATE_UNIT = 3
NUM_UNITS = 8
needs_a_clock = pytest.mark.skipif(
    not binding.get_process_triple().startswith("x86_64"), reason="no unit is done twice on this machine"
)


class _Fields(NamedTuple):
    """source, target: int64 [NUM_UNITS]; 0 for gate: nobody is held up."""

    source: int
    target: int
    visits: int  # how often LATE_UNIT was begun
    gate: int  # the first who begins it goes on when this is not 0
    opens: int  # address to be set to 1 when a unit is done; 0: none


_Record, _Call = record_types(_Fields)


@njit
def _double(address, unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    if unit == LATE_UNIT and next_ticket(call.visits) == 0 and call.gate != 0:
        while stepping._load(call.gate) == 0:
            pass
    store_i64(call.target + 8 * unit, 2 * load_i64(call.source + 8 * unit))
    if call.opens != 0:
        store_i64(call.opens, 1)


class Doubling:
    """A step that doubles `source` into `target`."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, *, gate: Any = None, opens: Any = None) -> None:
        self.visits = ctypes.c_int64()
        addresses = (0 if flag is None else ctypes.addressof(flag) for flag in (gate, opens))
        record = _Record(source.data_ptr(), target.data_ptr(), ctypes.addressof(self.visits), *addresses)
        self.step = step_of(Work(_double, record, (target,), (source,), source.numel(), keeps=(gate, opens)))


@pytest.fixture
def numbers() -> list[torch.Tensor]:
    """Places for a row of steps, the first filled."""
    return [torch.arange(NUM_UNITS) + 1, *(torch.zeros(NUM_UNITS, dtype=torch.int64) for _ in range(5))]


@pytest.fixture(autouse=True)
def compiled() -> None:
    compile_unit(_double)


def _run_within(program: Program, seconds: float, open_at_last: Any) -> bool:
    """Whether it ended by itself; else the gate is opened, so that it does."""
    thread = threading.Thread(target=program.run)
    thread.start()
    thread.join(seconds)
    ended = not thread.is_alive()
    open_at_last.value = 1
    thread.join()
    return ended


@needs_a_clock
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_nobody_waits_for_one_that_is_held_up(numbers: list[torch.Tensor], num_threads: int) -> None:
    """Who begins the unit is held up until the last step: only if the others do it as well does that come."""
    gate = ctypes.c_int64(1)
    first, second, third, last = numbers[:4]
    steps = [Doubling(first, second, gate=gate), Doubling(second, third), Doubling(third, last, opens=gate)]
    program = Program([doubling.step for doubling in steps], num_threads)
    program.run()  # how long a unit takes is not known before
    for _ in range(20):
        gate.value, steps[0].visits.value = 0, 0
        last.zero_()
        assert _run_within(program, 60.0, gate)
        assert torch.equal(last, 8 * first)
        assert steps[0].visits.value >= 2


@needs_a_clock
def test_what_a_late_thread_reads_is_not_overwritten(numbers: list[torch.Tensor]) -> None:
    """The third step writes where the first one reads, so it must wait for who is still in the first one."""
    gate, done = ctypes.c_int64(1), ctypes.c_int64()
    first, second, third = numbers[:3]
    before = first.clone()
    steps = [Doubling(first, second, gate=gate), Doubling(second, third), Doubling(third, first, opens=done)]
    program = Program([doubling.step for doubling in steps], 2)
    program.run()
    first.copy_(before)
    third.zero_()
    gate.value, done.value, steps[0].visits.value = 0, 0, 0
    thread = threading.Thread(target=program.run)
    thread.start()
    deadline = time.monotonic() + 30.0
    while third[LATE_UNIT] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert torch.equal(third, 4 * before), "the second step has not waited"
    time.sleep(0.2)
    was_overwritten = done.value == 1
    gate.value = 1
    thread.join()
    assert not was_overwritten
    assert torch.equal(second, 2 * before)
    assert torch.equal(first, 8 * before)


def test_a_write_conflicts_with_the_last_use_of_the_place() -> None:
    def step(writes: tuple[int, int], *reads: tuple[int, int]) -> Step:
        return Step((), (writes,), (writes, *reads))

    steps = [
        step((0, 8), (100, 108)),
        step((8, 16), (0, 8)),
        step((16, 24), (8, 16)),
        step((4, 6), (16, 24)),  # in what the second one reads
        step((100, 101)),  # in what the first one reads
        step((24, 32), (0, 24)),  # beside all of them
        step((30, 40)),
    ]
    assert last_conflicts(steps) == [-1, -1, -1, 1, 0, -1, 5]


def test_calls_of_one_unit_are_joined_unless_one_overwrites_what_another_used() -> None:
    def step(writes: tuple[int, int], reads: tuple[int, int], num_units: int = 1) -> Step:
        return Step((Work(0, None, (), (), num_units),), (writes,), (writes, reads))

    one, two, many = step((8, 16), (0, 8)), step((16, 24), (8, 16)), step((24, 32), (16, 24), 4)
    back = step((0, 8), (24, 32))
    assert [len(part.works) for part in joined([one, two, many, one, back])[0]] == [2, 1, 1, 1]
    together = joined([one, two])[0][0]
    assert together.writes == ((8, 16), (16, 24))
    assert set(together.uses) == {(0, 8), (8, 16), (16, 24)}
