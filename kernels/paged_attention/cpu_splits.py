"""Splits of the context in CPU attention, compiled: a row's running softmax over each, and how they become one.

A row's visible positions are divided at multiples of SPLIT. The softmax of each split starts anew, and the splits are
folded in ascending order, so a row's bits do not depend on who computes which split. A sink belongs to the first split
that a row sees. Folding into a total without scores, or a split without scores into a total, changes no bit.

A state is [value_dim padded + 32] floats: weighted values so far, sums of weights per lane, and the maximum.
"""

from __future__ import annotations

from numba import njit

from outrider.kernels.cpu.emitters import VECTOR_BYTES
from outrider.kernels.cpu.simd import load_f32, load_i64, store_f32, vadd, vexp, vload, vmul, vsplat, vstore
from outrider.kernels.paged_attention.cpu_loading import _padded_bytes

# logical positions, a multiple of a tile; determines the bits. Long enough that folding costs nothing beside it, short
# enough that a context of some thousand positions is work for several threads
SPLIT = 512
NO_SCORE = -1e30  # initial maximum; finite, so that differences are not NaN


@njit
def state_bytes(value_dim):  # type: ignore[no-untyped-def]
    """Bytes of a row's state."""
    return _padded_bytes(value_dim) + 2 * VECTOR_BYTES


@njit
def clear_state(state, value_dim):  # type: ignore[no-untyped-def]
    """Makes it the state of a row that has seen nothing."""
    end = _padded_bytes(value_dim) + VECTOR_BYTES
    for column in range(0, end, VECTOR_BYTES):
        vstore(state + column, vsplat(0.0))
    store_f32(state + end, NO_SCORE)


@njit
def fold(total, state, value_dim):  # type: ignore[no-untyped-def]
    """Adds a split's state to the total of those before it."""
    end = _padded_bytes(value_dim) + VECTOR_BYTES
    before, here = load_f32(total + end), load_f32(state + end)
    maximum = max(before, here)
    shrink_total, shrink_state = vexp(vsplat(before - maximum)), vexp(vsplat(here - maximum))
    for column in range(0, end, VECTOR_BYTES):
        scaled = vmul(vload(total + column), shrink_total)
        vstore(total + column, vadd(scaled, vmul(vload(state + column), shrink_state)))
    store_f32(total + end, maximum)


@njit
def begin_split(call, scratch, row_begin, row_end, position):  # type: ignore[no-untyped-def]
    """Puts what packed rows [row_begin, row_end) have seen into their totals, before a split's first tile."""
    size = state_bytes(call.value_dim)
    for row in range(row_begin, row_end):
        if load_i64(scratch + call.at_ranges + 16 * row) < position:
            state = scratch + call.at_states + row * size
            fold(scratch + call.at_totals + row * size, state, call.value_dim)
            clear_state(state, call.value_dim)
