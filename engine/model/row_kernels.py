"""The kernels for a model's norms, gates, rotations and linears on packed codes, by attention backend.

Not here: the kernels (kernels/*), where they are used (lean, row_invariance), attention's own (engine/attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.engine.errors import BackendUnavailable
from outrider.kernels.linear.codes import Codes
from outrider.kernels.linear.int8.reference import group_inputs as int8_groups

# inputs; widest group that "auto" multiplies in integers; the widest whose error is measured (docs/checkpoints.md)
_MOST_INT8_INPUTS = 32


class RmsNorm(Protocol):
    """The signature of kernels/rms_norm."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, one_plus_weight: bool, rounds_first: bool
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowKernels:
    """One backend's kernels; `backend` also selects the linears (kernels/linear/row_invariant).

    The fields are functions, not modules: lean_check deep-copies the modules that hold them.
    """

    backend: str  # "cpu" or "triton"
    rms_norm: RmsNorm
    takes_norm: Callable[[torch.Tensor], bool]  # weight
    gated_activation: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]  # gate, up, name
    takes_activation: Callable[[int, torch.dtype], bool]  # width
    # Takes heads, cos, sin; returns the rotated heads, may also rotate its argument in place.
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    takes_rotation: Callable[[int, torch.dtype], bool]  # number of rotated elements


def resolve_row_kernels(backend: str) -> RowKernels:
    """Returns the kernels of AttentionOps.row_backend. Raises BackendUnavailable."""
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
    # Maps x [..., K], what `pack` returned, bias [N] or None -> [..., N].
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    # Maps ids int64 [...], what `pack` returned for one weight -> its dequantised rows [..., K].
    rows: Callable[[torch.Tensor, Any], torch.Tensor]
    # Takes what `pack` returned, start, end; returns its outputs [start, end) in the same memory, or None if that is
    # impossible.
    outputs: Callable[[Any, int, int], PackedCodes | None]


def resolve_code_kernels(
    backend: str, dtype: torch.dtype, device: torch.device, arithmetic: str = "auto"
) -> CodeKernels | None:
    """Returns the kernels of AttentionOps.row_backend; None if this machine has none for rows of this dtype.

    arithmetic: of engine/settings. Raises BackendUnavailable where the machine lacks what is requested.
    """
    if backend == "cpu" and device.type == "cpu":
        return _on_cpu(device, dtype, arithmetic)
    if backend == "triton":
        return _on_gpu(device, dtype, arithmetic)
    return None


def _on_gpu(device: torch.device, dtype: torch.dtype, arithmetic: str) -> CodeKernels | None:
    """Returns the GPU's kernels. "auto" means bf16, since nothing was measured on a GPU."""
    from outrider.kernels.linear import triton_code_blocks as blocks
    from outrider.kernels.linear import triton_codes as bf16
    from outrider.kernels.linear.int8 import triton as int8

    if not bf16.supports(dtype, device.type):
        return None

    def in_integers(parts: Sequence[Codes]) -> bool:
        return arithmetic == "int8" and int8.takes_together(parts)

    def pack(parts: Sequence[Codes]) -> PackedCodes:
        return int8.pack(parts, device) if in_integers(parts) else blocks.pack(parts, device)

    def linear(x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return int8.linear(x, packed, bias) if isinstance(packed, int8.Int8Blocks) else bf16.linear(x, packed, bias)

    return CodeKernels("triton", device, blocks.takes_together, pack, linear, bf16.rows, blocks.outputs)


def _on_cpu(device: torch.device, dtype: torch.dtype, arithmetic: str) -> CodeKernels | None:
    """Returns the CPU's kernels: products in integers for the weights that are suited to them, else in bf16."""
    from outrider.kernels.linear import cpu_code_panels as bf16
    from outrider.kernels.linear.int8 import cpu_panels as int8

    if arithmetic == "int8" and dtype == torch.bfloat16 and not int8.supports(dtype):
        raise BackendUnavailable("packed_arithmetic='int8': this CPU has neither VNNI nor AVX2; use 'auto' or 'bf16'")
    has_int8, has_bf16 = arithmetic != "bf16" and int8.supports(dtype), bf16.supports(dtype)
    if not has_int8 and not has_bf16:
        return None

    def in_integers(parts: Sequence[Codes]) -> bool:
        size = int8_groups(parts) if has_int8 else None
        return size is not None and (arithmetic == "int8" or size <= _MOST_INT8_INPUTS or not has_bf16)

    def takes_together(parts: Sequence[Codes]) -> bool:
        return in_integers(parts) or (has_bf16 and bf16.takes_together(parts))

    def pack(parts: Sequence[Codes]) -> PackedCodes:
        return int8.pack(parts) if in_integers(parts) else bf16.pack(parts)

    def linear(x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return int8.linear(x, packed, bias) if isinstance(packed, int8.Int8Panels) else bf16.linear(x, packed, bias)

    def rows(ids: torch.Tensor, packed: Any) -> torch.Tensor:
        return int8.rows(ids, packed) if isinstance(packed, int8.Int8Panels) else bf16.rows(ids, packed)

    return CodeKernels("cpu", device, takes_together, pack, linear, rows, bf16.outputs)
