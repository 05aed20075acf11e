"""The compiled half of a program: how its threads go through the calls together, and what they do for one of them that
has lost its core.

All threads take units of a call until none is left, and a call is done when nobody is at one of its units. A thread
that another process has pushed off its core stays at its unit for as long as that lasts: 0.3 ms of every 1.3 taken from
one of two cores made a forward of 5.7 ms one of 9.8. So who waits longer than twice what the call's longest unit took
last time does that unit as well and goes on; the two write the same bytes. A late thread's unit must not see, nor
overwrite, what later calls write: a call waits for all who are still in the last call before it that uses the memory it
writes to (`blocker`).

What each thread is at is in a word of its own: 1 + its call in the upper half, 1 + its unit in the lower one (0: about
to take one); 0 while it waits, where it can hold up nobody. It says so before it takes a unit, so that who sees that
all units are taken sees who took them. A unit is done again only if the call is not done, looked up after having said
so: either the threads beyond the call see the second one at it, or it sees that they are beyond.

Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import binding, ir
from numba import carray, njit, types

from kernels.record import record_types
from kernels.simd import Builder, Value, load_i64, next_ticket, operation, store_i64
from kernels.units import do_unit

LINE_BYTES = 64  # of the cache
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_i, _void = types.int64, types.void
_SPINS_BEFORE_YIELD = 2000  # 30-90 us
# A unit is not done again before so many ticks: 10 to 25 us.
_LEAST_PATIENCE = 50_000
_FOR_EVER = 1 << 62


class _CallFields(NamedTuple):
    function: int
    record: int
    error: int  # address of an int64; 0: none


class _StepFields(NamedTuple):
    calls: int
    num_calls: int  # done one after another by whoever takes a unit: more than one only where each is one unit
    num_units: int
    blocker: int  # the last step before this one that uses what it writes; -1: none


class _ProgramFields(NamedTuple):
    steps: int
    num_steps: int
    num_threads: int
    give_way: int  # address of a function () -> int: let others have the core
    states: int  # a line for each step: units taken, whether it is done, ticks of its longest unit (kept between runs)
    places: int  # a line for each thread: what it is at
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
def _ask(builder: Builder, function: Value) -> Value:
    """function() of type int (void)."""
    function_type = ir.PointerType(ir.FunctionType(_I32, []))
    return builder.sext(builder.call(builder.inttoptr(function, function_type), []), _I64)


@operation(_i, _i)
def _look(builder: Builder, address: Value) -> Value:
    """The int64 at an address, with all that was written before it got its value."""
    return builder.load_atomic(builder.inttoptr(address, ir.PointerType(_I64)), "seq_cst", 8)


@operation(_void, _i, _i)
def _say(builder: Builder, address: Value, value: Value) -> None:
    """Put an int64 at an address, after all that this thread wrote before."""
    builder.store_atomic(value, builder.inttoptr(address, ir.PointerType(_I64)), "release", 8)


@operation(_void, _i, _i)
def _say_first(builder: Builder, address: Value, value: Value) -> None:
    """As _say, and before all that this thread looks at after it."""
    builder.atomic_rmw("xchg", builder.inttoptr(address, ir.PointerType(_I64)), value, "seq_cst")


@operation(_i, _i)
def _take(builder: Builder, address: Value) -> Value:
    """The int64 at an address, which grows by one; who sees it grown sees what this thread said before."""
    counter = builder.inttoptr(address, ir.PointerType(_I64))
    return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "seq_cst")


def _is_x86() -> bool:
    return bool(binding.get_process_triple().startswith("x86_64"))


@operation(_void)
def _pause(builder: Builder) -> None:
    """Tell the core that this is a waiting loop."""
    if _is_x86():
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])), []
        )


@operation(_i)
def _ticks(builder: Builder) -> Value:
    """A clock of 2 to 5 GHz; one that stands still on other machines, where no unit is done twice."""
    if not _is_x86():
        return ir.Constant(_I64, 0)
    counter = builder.module.declare_intrinsic("llvm.readcyclecounter", fnty=ir.FunctionType(_I64, []))
    return builder.call(counter, [])


@njit
def _wait_a_little(spins, give_way):  # type: ignore[no-untyped-def]
    """Another process may have the core that somebody needs."""
    _pause()
    if spins > _SPINS_BEFORE_YIELD:
        _ask(give_way)


@njit
def _wait_for_late_ones(program, thread, blocker):  # type: ignore[no-untyped-def]
    """Until no thread is in the call `blocker` or one before it."""
    for other in range(program.num_threads):
        spins = 0
        while other != thread and 0 < _look(program.places + other * LINE_BYTES) >> 32 <= blocker + 1:
            spins += 1
            _wait_a_little(spins, program.give_way)


@njit
def _do_unit(step, unit, thread):  # type: ignore[no-untyped-def]
    call = load_i64(step + _AT_CALLS)
    for _ in range(load_i64(step + _AT_NUM_CALLS)):
        do_unit(load_i64(call + _AT_FUNCTION), load_i64(call + _AT_RECORD), unit, thread)
        call += _CALL_BYTES


@njit
def _do_units(step, state, number, thread, mine):  # type: ignore[no-untyped-def]
    """Take units until none is left."""
    num_units, at = load_i64(step + _AT_NUM_UNITS), (number + 1) << 32
    longest = 0
    _say(mine, at)
    unit = _take(state + _AT_TAKEN)
    while unit < num_units:
        _say(mine, at + unit + 1)
        start = _ticks()
        _do_unit(step, unit, thread)
        longest = max(longest, _ticks() - start)
        _say(mine, at)
        unit = _take(state + _AT_TAKEN)
    _say(mine, 0)
    if longest > 0:
        # A thread that has lost its core for a while must not make the others patient.
        known = _look(state + _AT_TICKS)
        _say(state + _AT_TICKS, min(longest, 2 * known) if known > 0 else longest)


@njit
def _patience(state):  # type: ignore[no-untyped-def]
    known = _look(state + _AT_TICKS)
    return max(_LEAST_PATIENCE, 2 * known) if known > 0 else _FOR_EVER


@njit
def _finish(program, step, state, number, thread, mine):  # type: ignore[no-untyped-def]
    """Until nobody else is at a unit of this call that this thread has not done as well."""
    patience = _patience(state)
    for other in range(program.num_threads):
        if other == thread:
            continue
        place = program.places + other * LINE_BYTES
        seen, since, spins = _look(place), _ticks(), 0
        while seen >> 32 == number + 1:
            if _look(state + _AT_DONE) != 0:
                return
            now = _look(place)
            if now != seen:
                seen, since = now, _ticks()
            elif seen & 0xFFFFFFFF != 0 and _ticks() - since > patience:
                _say_first(mine, seen)
                if _look(state + _AT_DONE) == 0:
                    _do_unit(step, (seen & 0xFFFFFFFF) - 1, thread)
                _say(mine, 0)
                break
            spins += 1
            _wait_a_little(spins, program.give_way)
    _say_first(state + _AT_DONE, 1)


@njit
def run_steps(address):  # type: ignore[no-untyped-def]
    """What each thread does. address: of a ProgramRecord, its counters cleared."""
    program = carray(address, 1, _Program)[0]
    thread = next_ticket(program.next_thread)
    mine = program.places + thread * LINE_BYTES
    for number in range(program.num_steps):
        step, state = program.steps + number * _STEP_BYTES, program.states + number * LINE_BYTES
        if _look(state + _AT_DONE) == 0:
            _wait_for_late_ones(program, thread, load_i64(step + _AT_BLOCKER))
            _do_units(step, state, number, thread, mine)
            _finish(program, step, state, number, thread, mine)


@njit
def clear_counters(address):  # type: ignore[no-untyped-def]
    """Before each run; also what the calls have said of errors."""
    program = carray(address, 1, _Program)[0]
    store_i64(program.next_thread, 0)
    for thread in range(program.num_threads):
        store_i64(program.places + thread * LINE_BYTES, 0)
    for number in range(program.num_steps):
        state = program.states + number * LINE_BYTES
        store_i64(state + _AT_TAKEN, 0)
        store_i64(state + _AT_DONE, 0)
        step = program.steps + number * _STEP_BYTES
        for place in range(load_i64(step + _AT_NUM_CALLS)):
            error = load_i64(load_i64(step + _AT_CALLS) + place * _CALL_BYTES + _AT_ERROR)
            if error != 0:
                store_i64(error, 0)
