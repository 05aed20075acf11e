"""16 numbers in the model's dtype, whole or the first few, for the CPU kernels of recurrent layers. Needs numba."""

from __future__ import annotations

from numba import njit

from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.simd import (
    vload,
    vload_bf16,
    vload_bf16_first,
    vload_first,
    vround_bf16,
    vstore,
    vstore_bf16,
    vstore_bf16_first,
    vstore_first,
)


@njit
def load16(address, count, is_bf16):  # type: ignore[no-untyped-def]
    """The first count numbers as floats, then zeros; all 16 if count is larger."""
    if is_bf16:
        if count >= LANES:
            return vload_bf16(address)
        return vload_bf16_first(address, count)
    if count >= LANES:
        return vload(address)
    return vload_first(address, count)


@njit
def store16(address, value, count, is_bf16):  # type: ignore[no-untyped-def]
    """Store the first count numbers, rounded to the dtype; all 16 if count is larger."""
    if is_bf16:
        if count >= LANES:
            vstore_bf16(address, value)
        else:
            vstore_bf16_first(address, value, count)
    elif count >= LANES:
        vstore(address, value)
    else:
        vstore_first(address, value, count)


@njit
def round16(value, is_bf16):  # type: ignore[no-untyped-def]
    """Rounded to the dtype."""
    if is_bf16:
        return vround_bf16(value)
    return value
