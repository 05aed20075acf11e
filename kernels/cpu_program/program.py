"""Kernel calls made again, one after another, by one team of threads that meets between them.

The calls of a forward one by one cost a microsecond or two of Python each, and waking the team 50 times: 5 ms of a
17-ms step (158 M parameters, 1 row, 2 cores). Here the team is woken once, and threads wait for one another at a
counter. They spin a moment and then yield: another process may have the core that somebody needs.
Needs numba.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import carray, njit, types

from kernels import cpu_team, simd
from kernels.cpu_team import Work
from kernels.record import record_types
from kernels.simd import Builder, Value, load_i64, next_ticket, operation, store_i64

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_i, _void = types.int64, types.void
_SPINS_BEFORE_YIELD = 2000  # 30-90 us


class _StepFields(NamedTuple):
    function: int
    record: int
    num_threads: int
    counters: int
    num_counters: int
    meets: int  # 1: nobody goes on before all threads are through with this step


class _ProgramFields(NamedTuple):
    steps: int
    num_steps: int
    team_size: int  # address of a function () -> int: how many threads run this; 0: it is `num_threads`
    num_threads: int
    give_way: int  # address of a function () -> int: let others have the core
    next_thread: int  # addresses of counters
    arrived: int


_StepRecord, _Step = record_types(_StepFields)
_STEP_BYTES = _Step.itemsize
_AT_FUNCTION, _AT_RECORD, _AT_NUM_THREADS, _AT_COUNTERS, _AT_NUM_COUNTERS, _AT_MEETS = range(0, _STEP_BYTES, 8)
_ProgramRecord, _Program = record_types(_ProgramFields)


@operation(_void, _i, _i)
def _call(builder: Builder, function: Value, argument: Value) -> None:
    """function(argument) of type void (void *)."""
    pointer = ir.PointerType(_I8)
    function_type = ir.PointerType(ir.FunctionType(ir.VoidType(), [pointer]))
    builder.call(builder.inttoptr(function, function_type), [builder.inttoptr(argument, pointer)])


@operation(_i, _i)
def _ask(builder: Builder, function: Value) -> Value:
    """function() of type int (void)."""
    function_type = ir.PointerType(ir.FunctionType(_I32, []))
    return builder.sext(builder.call(builder.inttoptr(function, function_type), []), _I64)


@operation(_i, _i)
def _arrive(builder: Builder, address: Value) -> Value:
    """The int64 at an address, which grows by one; what this thread wrote before is seen by those who see it grown."""
    counter = builder.inttoptr(address, ir.PointerType(_I64))
    return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "acq_rel")


@operation(_i, _i)
def _look(builder: Builder, address: Value) -> Value:
    """The int64 at an address, with all that was written before it got its value."""
    return builder.load_atomic(builder.inttoptr(address, ir.PointerType(_I64)), "acquire", 8)


@operation(_void)
def _pause(builder: Builder) -> None:
    """Tell the core that this is a waiting loop."""
    if binding.get_process_triple().startswith("x86_64"):
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])), []
        )


@njit
def _wait(arrived, num_arrivals, give_way):  # type: ignore[no-untyped-def]
    spins = 0
    while _look(arrived) < num_arrivals:
        _pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _ask(give_way)


@njit
def _run_steps(address):  # type: ignore[no-untyped-def]
    """What each thread does."""
    program = carray(address, 1, _Program)[0]
    thread = next_ticket(program.next_thread)
    num_threads = _ask(program.team_size) if program.team_size != 0 else program.num_threads
    num_arrivals = 0
    for place in range(program.num_steps):
        step = program.steps + place * _STEP_BYTES
        if thread < load_i64(step + _AT_NUM_THREADS):
            _call(load_i64(step + _AT_FUNCTION), load_i64(step + _AT_RECORD))
        if load_i64(step + _AT_MEETS) and num_threads > 1:
            num_arrivals += num_threads
            _arrive(program.arrived)
            _wait(program.arrived, num_arrivals, program.give_way)


@njit
def _clear_counters(address):  # type: ignore[no-untyped-def]
    program = carray(address, 1, _Program)[0]
    store_i64(program.next_thread, 0)
    store_i64(program.arrived, 0)
    for place in range(program.num_steps):
        step = program.steps + place * _STEP_BYTES
        for counter in range(load_i64(step + _AT_NUM_COUNTERS)):
            store_i64(load_i64(step + _AT_COUNTERS) + 8 * counter, 0)


def _make_run(digest: int) -> Callable[[Any], None]:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            _run_steps(address)

    return entry


def _make_clear(digest: int) -> Callable[[Any], None]:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            _clear_counters(address)

    return entry


@functools.cache
def _entry(make_entry: Callable[[int], Callable[[Any], None]]) -> int:
    return cpu_team.compile_entry(make_entry, (simd,))


class Program:
    """The calls, in their order, on as many threads as the widest of them may have. For one caller at a time."""

    def __init__(self, works: Sequence[Work], max_threads: int) -> None:
        """All that the records point to has to live as long as this."""
        self._works = tuple(works)
        self._with_errors = tuple(work for work in works if work.errors)
        self._num_threads = min(max_threads, max((work.num_threads for work in works), default=1))
        self._steps = (_StepRecord * len(works))(*(_describe(*pair) for pair in _with_next(works)))
        self._counters = (ctypes.c_int64 * 16)()  # two, each on a cache line of its own
        first = ctypes.addressof(self._counters)
        team_size, give_way = _team_functions()
        self._record = _ProgramRecord(
            ctypes.addressof(self._steps), len(works), team_size, self._num_threads, give_way, first, first + 64
        )
        self._address = ctypes.addressof(self._record)

    def run(self) -> None:
        """Make all calls. Raises KernelArgumentError for what one of them says; those after it were made too."""
        cpu_team.run_here(_entry(_make_clear), self._address)
        if self._num_threads == 1:
            cpu_team.run_here(_entry(_make_run), self._address)
        else:
            cpu_team.default_team()(_entry(_make_run), self._address, self._num_threads)
        for work in self._with_errors:
            cpu_team.raise_error(work)


def _with_next(works: Sequence[Work]) -> list[tuple[Work, Work | None]]:
    return list(zip(works, [*works[1:], None], strict=True))


def _describe(work: Work, following: Work | None) -> Any:
    # Calls on the first thread alone follow one another without a word to the others.
    meets = following is not None and max(work.num_threads, following.num_threads) > 1
    counters = work.counters
    return _StepRecord(
        work.function,
        ctypes.addressof(work.record),
        work.num_threads,
        0 if counters is None else ctypes.addressof(counters),
        0 if counters is None else len(counters),
        meets,
    )


@functools.cache
def _team_functions() -> tuple[int, int]:
    """Addresses of `omp_get_num_threads` (a team may be smaller than was asked for) and `sched_yield`."""
    process = ctypes.CDLL(None)
    parallel = cpu_team.openmp_library()
    team_size = 0 if parallel is None else _address_of(parallel.omp_get_num_threads)
    return team_size, _address_of(process.sched_yield)


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
