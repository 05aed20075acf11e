"""Vectors of 16 floats for numba: the few machine operations the CPU kernels are written in.

Why not loops for the auto-vectoriser: a vectorised body and its scalar tail may round differently, and the
choice depends on lengths. Here each lane of each operation is one IEEE operation in the order written, no
fast-math flag anywhere, so the bits of a lane cannot depend on the other lanes, on how many rows a block
holds, or on the width of the machine's registers. Addresses are plain int64; nothing here checks a bound.

Not for machines without numba: only the `cpu.py` files import this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF32, _VI16, _VI32 = (ir.VectorType(element, LANES) for element in (_F32, _I16, _I32))
_BF16_ROUNDING, _QUIET_NAN = 0x7FFF, 0x0040


class Vec16(types.Type):  # type: ignore[misc]
    """16 floats in one register (or two, or four, where registers are narrower)."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


vec16 = Vec16()


@register_model(Vec16)
class _Vec16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Vec16) -> None:
        super().__init__(manager, numba_type, _VF32)


Emit = Callable[..., ir.Value]


def _operation(result: types.Type, operands: tuple[types.Type, ...], emit: Emit) -> Any:
    """Make emit(builder, *operands) callable from numba code; the operands are cast to the given types."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: list[ir.Value]) -> ir.Value:
        value = emit(builder, *values)
        return cgutils.get_null_value(ir.LiteralStructType([])) if value is None else value

    names = [f"x{i}" for i in range(len(operands))]
    namespace: dict[str, Any] = {"signature": result(*operands), "codegen": codegen}
    # numba reads the parameter list of the function itself, so each arity needs its own.
    exec(f"def op(typingctx, {', '.join(names)}):\n    return signature, codegen", namespace)
    return intrinsic(namespace["op"])
