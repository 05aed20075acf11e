"""The kernels of recurrent layers, by attention backend.

Not here: the kernels (kernels/recurrent), the modules that call them (mixers).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.recurrent.gated_delta.arguments import GatedDelta
from outrider.kernels.recurrent.gated_norm.arguments import GatedNorm
from outrider.kernels.recurrent.mamba1.arguments import Mamba1
from outrider.kernels.recurrent.mamba2.arguments import Mamba2
from outrider.kernels.recurrent.short_conv.arguments import ShortConv


@dataclass(frozen=True)
class RecurrentKernels:
    """One backend's kernels, as functions, not modules: they are deep-copied with the mixers that hold them."""

    gated_delta: GatedDelta
    mamba1: Mamba1
    mamba2: Mamba2
    short_conv: ShortConv
    gated_norm: GatedNorm


def resolve_recurrent_kernels(backend: str) -> RecurrentKernels:
    """Returns the kernels of AttentionOps.backend."""
    # Imported here: numba and triton import slowly, and a machine may lack one of them.
    if backend == "cpu":
        from outrider.kernels.recurrent.cpu import gated_delta, mamba1, mamba2
        from outrider.kernels.recurrent.gated_norm.cpu import gated_norm
        from outrider.kernels.recurrent.short_conv.cpu import short_conv
    elif backend == "triton":
        from outrider.kernels.recurrent.gated_norm.triton import gated_norm
        from outrider.kernels.recurrent.short_conv.triton import short_conv
        from outrider.kernels.recurrent.triton import gated_delta, mamba1, mamba2
    else:
        from outrider.kernels.recurrent.gated_delta.reference import gated_delta
        from outrider.kernels.recurrent.gated_norm.reference import gated_norm
        from outrider.kernels.recurrent.mamba1.reference import mamba1
        from outrider.kernels.recurrent.mamba2.reference import mamba2
        from outrider.kernels.recurrent.short_conv.reference import short_conv
    return RecurrentKernels(gated_delta, mamba1, mamba2, short_conv, gated_norm)
