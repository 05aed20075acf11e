"""Functions of recurrent layers on an NVIDIA GPU, in fp32 (triton). None overflows, none depends on its neighbours."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)), computed from exp(-|x|)."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)). Triton has no log1p: log(u) * small / (u - 1) with u = 1 + small, rounded, cancels the rounding
    of u (Goldberg 1991, theorem 4)."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    excess = rounded - 1.0
    tail = tl.where(excess == 0.0, small, tl.log(rounded) * small / tl.where(excess == 0.0, 1.0, excess))
    return tl.maximum(x, 0.0) + tail


@triton.jit
def parent_of(parents, node, num_rows):  # type: ignore[no-untyped-def]
    """Returns the row before `node` in its session; parents: of the session's first row on.

    Rows before the call are negative and form a chain. An invalid parent is never taken for a later row, so that every
    walk ends."""
    is_row = (node >= 0) & (node < num_rows)
    return tl.minimum(tl.load(parents + node, mask=is_row, other=2147483647), node - 1)
