"""A recorded sequence of kernel calls, replayed by a thread team that is woken once (`stepping`).

Called one by one, the kernels of a forward cost 1-2 us of Python each and 50 wake-ups of the team: 5 of 17 ms (158 M
parameters, 1 row, 2 cores). Needs numba.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.program import stepping
from outrider.kernels.cpu.program.stepping import LINE_BYTES, CallRecord, ProgramRecord, StepRecord
from outrider.kernels.cpu.team import Work

_Range = tuple[int, int]  # of addresses, half-open


class Step(NamedTuple):
    """Single-unit calls that one thread makes in order, or one call of several units; and the memory they use."""

    works: tuple[Work, ...]  # without tensors, whose arena memory would stay taken
    writes: tuple[_Range, ...]
    uses: tuple[_Range, ...]  # written or read

    @property
    def num_units(self) -> int:
        """Number of units of a single call; 1 for joined calls."""
        return self.works[0].num_units


def step_of(work: Work) -> Step:
    """The call, its tensors replaced by their address ranges."""
    writes, reads = (tuple(_range_of(tensor) for tensor in tensors) for tensors in (work.writes, work.reads))
    return Step((dataclasses.replace(work, writes=(), reads=()),), writes, writes + reads)


def joined(steps: Sequence[Step], cuts: Sequence[int] = ()) -> tuple[list[Step], list[int]]:
    """Consecutive single-unit calls merged into one step, which saves the threads' synchronisation between them.

    A call that overwrites what an earlier one of the step used is not merged: the step could not be repeated. cuts:
    ascending numbers of steps after which nothing is merged; returned as numbers of merged ones."""
    result: list[Step] = []
    ends: list[int] = []
    for number, step in enumerate(steps):
        is_cut = number in cuts
        ends += [len(result)] * is_cut
        last = result[-1] if result and not is_cut else None
        if last and last.num_units == step.num_units == 1 and not _overlap(step.writes, last.uses):
            result[-1] = Step(last.works + step.works, last.writes + step.writes, last.uses + step.uses)
        else:
            result.append(step)
    return result, ends + [len(result)] * (len(cuts) - len(ends))


class Program:
    """Runs the steps in order on up to num_threads threads. One caller at a time."""

    def __init__(self, steps: Sequence[Step], num_threads: int, cuts: Sequence[int] = ()) -> None:
        """The memory that the records point to must outlive this object. cuts: where `run` may end, as in `joined`."""
        steps, self._ends = joined(steps, cuts)
        self._works = tuple(work for step in steps for work in step.works)
        self._with_errors = tuple(work for work in self._works if work.errors)
        self._num_threads = num_threads if any(step.num_units > 1 for step in steps) else 1
        self._calls = (CallRecord * len(self._works))(*map(_describe, self._works))
        self._steps = (StepRecord * len(steps))(*self._step_records(steps))
        # One cache line per step, one per thread, one shared; one more for alignment.
        self._counters = (ctypes.c_uint8 * (LINE_BYTES * (len(steps) + self._num_threads + 2)))()
        first = ctypes.addressof(self._counters)
        first += -first % LINE_BYTES
        threads = first + LINE_BYTES * len(steps)
        self._record = ProgramRecord(
            ctypes.addressof(self._steps), len(steps), self._num_threads, _address_of_yield(), first, threads,
            threads + LINE_BYTES * self._num_threads,
        )  # fmt: skip
        self._address = ctypes.addressof(self._record)

    def _step_records(self, steps: Sequence[Step]) -> Iterator[Any]:
        calls = ctypes.addressof(self._calls)
        for step, blocker in zip(steps, last_conflicts(steps), strict=True):
            yield StepRecord(calls, len(step.works), step.num_units, blocker)
            calls += len(step.works) * ctypes.sizeof(CallRecord)

    def run(self, cut: int | None = None) -> None:
        """Make all calls, or those before a cut, by its index. Raises KernelArgumentError if one reports an error; the
        calls after it have run too."""
        self._record.num_steps = len(self._steps) if cut is None else self._ends[cut]
        cpu_team.run_here(cpu_team.compile_entry(stepping.clear_counters), self._address)
        if self._num_threads == 1:
            cpu_team.run_here(cpu_team.compile_entry(stepping.run_steps), self._address)
        else:
            cpu_team.default_team()(cpu_team.compile_entry(stepping.run_steps), self._address, self._num_threads)
        for work in self._with_errors:
            cpu_team.raise_error(work)


def last_conflicts(steps: Sequence[Step]) -> list[int]:
    """Returns for each step the last earlier step that uses memory it writes; -1: none."""
    return [
        next((earlier for earlier in range(index - 1, -1, -1) if _overlap(step.writes, steps[earlier].uses)), -1)
        for index, step in enumerate(steps)
    ]


def _overlap(left: tuple[_Range, ...], right: tuple[_Range, ...]) -> bool:
    return any(first < other_end and other_first < end for first, end in left for other_first, other_end in right)


def _range_of(tensor: torch.Tensor) -> _Range:
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _describe(work: Work) -> Any:
    error = 0 if work.error is None else ctypes.addressof(work.error)
    return CallRecord(cpu_team.compile_unit(work.unit), ctypes.addressof(work.record), error)


@functools.cache
def _address_of_yield() -> int:
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
