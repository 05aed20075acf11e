"""Compiled work in units: how a kernel's function is called, and how several threads share its units.

A kernel's compiled function is `void (void *record, int64 unit, int64 thread)`: it does one unit of the call that the
record describes, in the working memory of that thread. What comes out must not depend on who does which unit, nor on
whether a unit is done once or twice. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import carray, njit, types

from kernels.record import record_types
from kernels.simd import Builder, Value, next_ticket, operation

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_i = types.int64


class _CallFields(NamedTuple):
    function: int
    record: int
    num_units: int
    next_unit: int  # addresses of counters, zero at first
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
    """What each thread of a team does: units, one after another, until none is left. address: of a CallRecord."""
    call = carray(address, 1, _Call)[0]
    thread = next_ticket(call.next_thread)
    unit = next_ticket(call.next_unit)
    while unit < call.num_units:
        do_unit(call.function, call.record, unit, thread)
        unit = next_ticket(call.next_unit)
