"""The kernels for a model's norms, gates, rotations and linears on packed codes, by attention backend.

Not here: the kernels (kernels/*), where they are used (lean, row_invariance), attention's own (engine/attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from outrider.engine.errors import BackendUnavailable
from outrider.kernels.linear.codes import Codes


class RmsNorm(Protocol):
    """kernels/rms_norm."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, one_plus_weight: bool, rounds_first: bool
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowKernels:
    """One backend's kernels; `backend` also selects the linears (kernels/linear/row_invariant).

    Functions, not modules: lean_check deep-copies the modules that hold them.
    """

    backend: str  # "cpu" or "triton"
    rms_norm: RmsNorm
    takes_norm: Callable[[torch.Tensor], bool]  # weight
    gated_activation: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]  # gate, up, name
    takes_activation: Callable[[int, torch.dtype], bool]  # width
    # heads, cos, sin; returns the rotated heads, may also rotate its argument in place.
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    takes_rotation: Callable[[int, torch.dtype], bool]  # number of rotated elements


def resolve_row_kernels(backend: str) -> RowKernels:
    """The kernels of AttentionOps.row_backend. Raises BackendUnavailable."""
    # Imported here: numba and triton import slowly, and a machine may lack one of them.
    if backend == "cpu":
        from outrider.kernels.gated_activation import cpu as cpu_activation
        from outrider.kernels.rms_norm import cpu as cpu_norm
        from outrider.kernels.rotary import cpu as cpu_rotary

        return RowKernels(
            backend,
            *(cpu_norm.rms_norm, cpu_norm.supports),
            *(cpu_activation.gated_activation, cpu_activation.supports),
            *(cpu_rotary.rotate, cpu_rotary.supports),
        )
    if backend == "triton":
        from outrider.kernels.gated_activation import triton as triton_activation
        from outrider.kernels.rms_norm import triton as triton_norm
        from outrider.kernels.rotary import triton as triton_rotary

        return RowKernels(
            backend,
            *(triton_norm.rms_norm, triton_norm.supports),
            *(triton_activation.gated_activation, triton_activation.supports),
            *(triton_rotary.rotate_, triton_rotary.supports),
        )
    raise BackendUnavailable(f"row kernels {backend!r}: choose one of cpu, triton")


class PackedCodes(Protocol):
    """Quantised weights, packed as one linear [num_outputs, num_inputs]."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of codes, sorted."""


@dataclass(frozen=True)
class CodeKernels:
    """One backend's linears on packed codes, and the device of what they pack."""

    backend: str  # "cpu" or "triton"
    device: torch.device
    takes_together: Callable[[Sequence[Codes]], bool]
    pack: Callable[[Sequence[Codes]], PackedCodes]
    # x [..., K], what `pack` gave, bias [N] or None -> [..., N]
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    # ids int64 [...], what `pack` gave for one weight -> its dequantised rows [..., K]
    rows: Callable[[torch.Tensor, Any], torch.Tensor]
    # what `pack` gave, start, end -> its outputs [start, end) in the same memory; None: they cannot be had
    outputs: Callable[[Any, int, int], PackedCodes | None]


def resolve_code_kernels(backend: str, dtype: torch.dtype, device: torch.device) -> CodeKernels | None:
    """The kernels of AttentionOps.row_backend; None: this machine has none for rows of this dtype."""
    if backend == "cpu" and device.type == "cpu":
        from outrider.kernels.linear import cpu_code_panels as cpu

        if cpu.supports(dtype):
            return CodeKernels(backend, device, cpu.takes_together, cpu.pack, cpu.linear, cpu.rows, cpu.outputs)
    if backend == "triton":
        from outrider.kernels.linear import triton_code_blocks as blocks
        from outrider.kernels.linear import triton_codes

        if triton_codes.supports(dtype, device.type):
            pack = partial(blocks.pack, device=device)
            return CodeKernels(
                backend, device, blocks.takes_together, pack, triton_codes.linear, triton_codes.rows, blocks.outputs
            )
    return None
