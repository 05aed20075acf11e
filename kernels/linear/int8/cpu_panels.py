"""Row-invariant linears on quantised weights in integers, for CPUs with AVX2: codes stay packed, rows take 8 bits.

The law is int8.reference's: no bit depends on the CPU. A weight whose codes span at most 16, 32 or 64 values, or have
at most 16, takes 4, 5 or 6 bits each, any other 8 bits; scales are kept as in cpu_code_panels.
Needs numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import cpu_code_panels
from outrider.kernels.linear import cpu_panels as bf16_panels
from outrider.kernels.linear.codes import Codes, grouping_of
from outrider.kernels.linear.cpu_code_packing import Part, factors_of, records_of
from outrider.kernels.linear.int8 import cpu_lines as lines
from outrider.kernels.linear.int8 import cpu_rows, reference
from outrider.kernels.linear.int8 import cpu_tiles as tiles


@dataclass(frozen=True)
class Int8Panels(cpu_code_panels.PackedParts):
    """Weights packed as one; `panels` has the addresses of the parts."""

    group_inputs: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the parts' kinds, sorted."""
        return tuple(sorted({lines.NAMES[part.kind] for part in self.parts}))


def supports(dtype: torch.dtype) -> bool:
    """Returns whether codes can be multiplied in integers with rows of this dtype on this machine."""
    return dtype == torch.bfloat16 and lines.instruction() is not None


def takes_together(parts: Sequence[Codes]) -> bool:
    """Returns whether weights can be packed as one."""
    return reference.group_inputs(parts) is not None


def pack(codes: Sequence[Codes]) -> Int8Panels:
    """The weights one below the other. Raises KernelArgumentError: they cannot be packed together."""
    size = reference.group_inputs(codes)
    if size is None:
        raise KernelArgumentError("these codes cannot be packed as one weight in integers")
    parts = tuple(_pack_part(part, size) for part in codes)
    num_outputs, order = sum(part.num_outputs for part in parts), grouping_of(codes[0]).order
    return Int8Panels(num_outputs, codes[0].shape[1], parts, records_of(parts), order, size)


def _pack_part(codes: Codes, size: int) -> Part:
    order, numbers = grouping_of(codes).order, codes.numbers.view(torch.uint8)
    kind, base, table, packed = lines.pack_lines(numbers if order is None else numbers[:, order])
    return Part(kind, codes.shape[0], size // reference.QUAD, packed, table, *factors_of(codes, size), base=base)


def linear(x: torch.Tensor, packed: Int8Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], bias bf16 [N], contiguous, or None; returns bf16 [..., N].

    Raises KernelArgumentError for another width or dtype.
    """
    num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
    out = bf16_panels.empty_output(x, num_outputs, num_inputs)
    num_rows = x.numel() // num_inputs
    if out.numel() == 0:
        return out
    codes, groups = _quantised(x.contiguous(), packed, num_rows)
    threads = bf16_panels.num_threads(num_outputs * num_inputs, num_rows)
    call = tiles.CallRecord(
        codes.data_ptr(), codes.stride(0), groups.data_ptr(), 4 * groups.stride(0),
        packed.panels.data_ptr(), len(packed.panels), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), 2 * num_outputs, num_rows, -(-num_inputs // reference.QUAD), threads,
        cpu_team.scratch(tiles.SCRATCH_BYTES, threads),
    )  # fmt: skip
    work = cpu_team.Work(tiles.run_panel, call, (out,), (codes, groups), len(packed.panels), threads)
    cpu_team.run(work)
    return out


def _quantised(x: torch.Tensor, packed: Int8Panels, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' codes int8 [T, whole quads], and the numbers of their groups [T, G * 3], of 32 bits each."""
    num_inputs, size = packed.num_inputs, packed.group_inputs
    codes = x.new_empty((num_rows, num_inputs + -num_inputs % reference.QUAD), dtype=torch.int8)
    groups = x.new_empty((num_rows, -(-num_inputs // size) * lines.GROUP_BYTES // 4), dtype=torch.float32)
    threads = bf16_panels.num_threads(0, num_rows)
    call = cpu_rows.QuantiseRecord(
        x.data_ptr(), 2 * num_inputs, num_inputs, 0 if packed.order is None else packed.order.data_ptr(), size,
        codes.data_ptr(), codes.stride(0), groups.data_ptr(), 4 * groups.stride(0),
        0 if packed.order is None else cpu_team.scratch(2 * (num_inputs + num_inputs % 2), threads),
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(cpu_rows.quantise_row, call, (codes, groups), (x,), num_rows, threads))
    return codes, groups


def rows(ids: torch.Tensor, packed: Int8Panels) -> torch.Tensor:
    """Dequantised weights of the outputs that ids int64 [...] names, bf16 [..., K]: an embedding that shares them.

    Raises KernelArgumentError for packed weights of several parts, or an id outside.
    """
    return cpu_code_panels.decoded_rows(ids, packed, cpu_rows.decode_row)


outputs = cpu_code_panels.outputs
