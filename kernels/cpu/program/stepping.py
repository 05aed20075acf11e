"""The compiled half of a program: its threads step through the calls together, without locks.

Threads take units of a step until none is left. A step is done when no thread is at one of its units.

Repeated units: a thread preempted in a unit would stall the others (a forward of 5.7 ms took 9.8 next to a process that
takes 0.3 of every 1.3 ms of one of two cores). A thread that has waited for twice the step's longest unit of the last
run executes that unit too; both write the same bytes. The late thread must neither read nor overwrite what later steps
write: each step first waits for every thread at or before its `blocker`.

Position word, one per thread: upper half 1 + step, lower half 1 + unit (0: about to take one); 0: waiting, blocks
nobody. The memory order is in ../README.md. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import binding, ir
from numba import carray, njit, types

from outrider.kernels.cpu.emitters import Builder, Value
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import load_i64, next_ticket, operation, store_i64
from outrider.kernels.cpu.units import do_unit

LINE_BYTES = 64  # bytes; a cache line
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_i, _void = types.int64, types.void
_SPINS_BEFORE_YIELD = 2000  # spins, 30-90 us; wait before sched_yield
_MIN_PATIENCE = 50_000  # ticks, 10-25 us; shortest wait before a unit is repeated
_FOREVER = 1 << 62  # ticks


class _CallFields(NamedTuple):
    function: int
    record: int
    error: int  # address of an int64; 0: none


class _StepFields(NamedTuple):
    calls: int
    num_calls: int  # run in order by the thread that takes the unit; above 1 only if each call is a single unit
    num_units: int
    blocker: int  # last earlier step that reads or writes memory which this one writes; -1: none


class _ProgramFields(NamedTuple):
    steps: int
    num_steps: int
    num_threads: int
    yield_core: int  # address of int sched_yield(void)
    states: int  # a cache line per step: units taken, is done, ticks of its longest unit (kept between runs)
    positions: int  # a cache line per thread: its position word
    next_thread: int  # address of a counter


CallRecord, _Call = record_types(_CallFields)
_CALL_BYTES = _Call.itemsize
_AT_FUNCTION, _AT_RECORD, _AT_ERROR = range(0, _CALL_BYTES, 8)
StepRecord, _Step = record_types(_StepFields)
_STEP_BYTES = _Step.itemsize
_AT_CALLS, _AT_NUM_CALLS, _AT_NUM_UNITS, _AT_BLOCKER = range(0, _STEP_BYTES, 8)
ProgramRecord, _Program = record_types(_ProgramFields)
_AT_TAKEN, _AT_DONE, _AT_TICKS = 0, 8, 16


@operation(_i, _i)
def _call_int(builder: Builder, function: Value) -> Value:
    """function() of type int (void)."""
    function_type = ir.PointerType(ir.FunctionType(_I32, []))
    return builder.sext(builder.call(builder.inttoptr(function, function_type), []), _I64)


@operation(_i, _i)
def _load(builder: Builder, address: Value) -> Value:
    """seq_cst load of an int64."""
    return builder.load_atomic(builder.inttoptr(address, ir.PointerType(_I64)), "seq_cst", 8)


@operation(_void, _i, _i)
def _store(builder: Builder, address: Value, value: Value) -> None:
    """Release store of an int64: earlier writes of this thread become visible first."""
    builder.store_atomic(value, builder.inttoptr(address, ir.PointerType(_I64)), "release", 8)


@operation(_void, _i, _i)
def _store_fenced(builder: Builder, address: Value, value: Value) -> None:
    """seq_cst store of an int64: it also becomes visible before any later load of this thread."""
    builder.atomic_rmw("xchg", builder.inttoptr(address, ir.PointerType(_I64)), value, "seq_cst")


@operation(_i, _i)
def _fetch_add(builder: Builder, address: Value) -> Value:
    """seq_cst fetch-and-increment: whoever sees the new value sees this thread's earlier stores."""
    counter = builder.inttoptr(address, ir.PointerType(_I64))
    return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "seq_cst")


def _is_x86() -> bool:
    return bool(binding.get_process_triple().startswith("x86_64"))


@operation(_void)
def _pause(builder: Builder) -> None:
    """Spin-loop hint."""
    if _is_x86():
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])), []
        )


@operation(_i)
def _ticks(builder: Builder) -> Value:
    """Time-stamp counter, 2 to 5 GHz; constant on other architectures, where no unit is repeated."""
    if not _is_x86():
        return ir.Constant(_I64, 0)
    counter = builder.module.declare_intrinsic("llvm.readcyclecounter", fnty=ir.FunctionType(_I64, []))
    return builder.call(counter, [])


@njit
def _back_off(spins, yield_core):  # type: ignore[no-untyped-def]
    """Spin, then yield: the awaited thread may need this core."""
    _pause()
    if spins > _SPINS_BEFORE_YIELD:
        _call_int(yield_core)


@njit
def _wait_for_late_threads(program, thread, blocker):  # type: ignore[no-untyped-def]
    """Wait until no thread is at step `blocker` or before it."""
    for other in range(program.num_threads):
        spins = 0
        while other != thread and 0 < _load(program.positions + other * LINE_BYTES) >> 32 <= blocker + 1:
            spins += 1
            _back_off(spins, program.yield_core)


@njit
def _do_unit(step, unit, thread):  # type: ignore[no-untyped-def]
    call = load_i64(step + _AT_CALLS)
    for _ in range(load_i64(step + _AT_NUM_CALLS)):
        do_unit(load_i64(call + _AT_FUNCTION), load_i64(call + _AT_RECORD), unit, thread)
        call += _CALL_BYTES


@njit
def _do_units(step, state, number, thread, mine):  # type: ignore[no-untyped-def]
    """Take units of a step until none is left. mine: address of this thread's position word."""
    num_units, at = load_i64(step + _AT_NUM_UNITS), (number + 1) << 32
    longest = 0
    _store(mine, at)
    unit = _fetch_add(state + _AT_TAKEN)
    while unit < num_units:
        _store(mine, at + unit + 1)
        start = _ticks()
        _do_unit(step, unit, thread)
        longest = max(longest, _ticks() - start)
        _store(mine, at)
        unit = _fetch_add(state + _AT_TAKEN)
    _store(mine, 0)
    if longest > 0:
        # At most doubled: the time of a preempted thread must not lengthen the next run's patience.
        known = _load(state + _AT_TICKS)
        _store(state + _AT_TICKS, min(longest, 2 * known) if known > 0 else longest)


@njit
def _patience(state):  # type: ignore[no-untyped-def]
    known = _load(state + _AT_TICKS)
    return max(_MIN_PATIENCE, 2 * known) if known > 0 else _FOREVER


@njit
def _finish(program, step, state, number, thread, mine):  # type: ignore[no-untyped-def]
    """Wait until every unit of the step is complete, repeating those of late threads; then mark the step done."""
    patience = _patience(state)
    for other in range(program.num_threads):
        if other == thread:
            continue
        position = program.positions + other * LINE_BYTES
        seen, since, spins = _load(position), _ticks(), 0
        while seen >> 32 == number + 1:
            if _load(state + _AT_DONE) != 0:
                return
            now = _load(position)
            if now != seen:
                seen, since = now, _ticks()
            elif seen & 0xFFFFFFFF != 0 and _ticks() - since > patience:
                # Announced before `done` is read: either threads beyond the step see it, or it sees them beyond.
                _store_fenced(mine, seen)
                if _load(state + _AT_DONE) == 0:
                    _do_unit(step, (seen & 0xFFFFFFFF) - 1, thread)
                _store(mine, 0)
                break
            spins += 1
            _back_off(spins, program.yield_core)
    _store_fenced(state + _AT_DONE, 1)


@njit
def run_steps(address):  # type: ignore[no-untyped-def]
    """Entry of each thread. address: of a ProgramRecord with cleared counters."""
    program = carray(address, 1, _Program)[0]
    thread = next_ticket(program.next_thread)
    mine = program.positions + thread * LINE_BYTES
    for number in range(program.num_steps):
        step, state = program.steps + number * _STEP_BYTES, program.states + number * LINE_BYTES
        if _load(state + _AT_DONE) == 0:
            _wait_for_late_threads(program, thread, load_i64(step + _AT_BLOCKER))
            _do_units(step, state, number, thread, mine)
            _finish(program, step, state, number, thread, mine)


@njit
def clear_counters(address):  # type: ignore[no-untyped-def]
    """Reset the counters and the calls' errors; run before each run_steps, on one thread."""
    program = carray(address, 1, _Program)[0]
    store_i64(program.next_thread, 0)
    for thread in range(program.num_threads):
        store_i64(program.positions + thread * LINE_BYTES, 0)
    for number in range(program.num_steps):
        state = program.states + number * LINE_BYTES
        store_i64(state + _AT_TAKEN, 0)
        store_i64(state + _AT_DONE, 0)
        step = program.steps + number * _STEP_BYTES
        for index in range(load_i64(step + _AT_NUM_CALLS)):
            error = load_i64(load_i64(step + _AT_CALLS) + index * _CALL_BYTES + _AT_ERROR)
            if error != 0:
                store_i64(error, 0)
