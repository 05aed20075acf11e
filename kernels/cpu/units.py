"""Calls a kernel's compiled function and shares its units of work among threads.

The function is `void (void *record, int64 unit, int64 thread)`: it executes one unit of the recorded call in that
thread's scratch memory. The result must not depend on which thread executes a unit, nor on how often. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import carray, njit, types

from outrider.kernels.cpu.emitters import Builder, Value
from outrider.kernels.cpu.record import record_types
from outrider.kernels.cpu.simd import next_ticket, operation

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_i = types.int64


class _CallFields(NamedTuple):
    function: int
    record: int
    num_units: int
    next_unit: int  # addresses of counters, initially zero
    next_thread: int


CallRecord, _Call = record_types(_CallFields)


@operation(types.void, _i, _i, _i, _i)
def do_unit(builder: Builder, function: Value, record: Value, unit: Value, thread: Value) -> None:
    """function(record, unit, thread)."""
    pointer = ir.PointerType(_I8)
    function_type = ir.PointerType(ir.FunctionType(ir.VoidType(), [pointer, _I64, _I64]))
    builder.call(builder.inttoptr(function, function_type), [builder.inttoptr(record, pointer), unit, thread])


@njit
def share_units(address):  # type: ignore[no-untyped-def]
    """Entry of each thread of a team: take units until none is left. address: of a CallRecord."""
    call = carray(address, 1, _Call)[0]
    thread = next_ticket(call.next_thread)
    unit = next_ticket(call.next_unit)
    while unit < call.num_units:
        do_unit(call.function, call.record, unit, thread)
        unit = next_ticket(call.next_unit)


@njit
def place_among_neighbours(unit, num_units, num_threads):  # type: ignore[no-untyped-def]
    """Which of num_units places unit stands for, so that threads that take units in turn each stay among neighbours.

    For units that read weights in order: what a thread prefetches behind its unit's end is its next unit's beginning.
    """
    thread, turn = unit % num_threads, unit // num_threads
    return thread * (num_units // num_threads) + min(thread, num_units % num_threads) + turn
