"""Row-invariant linears on quantised weights, for the CPUs of cpu_panels: codes stay packed, and no weight is rounded.

The law is coded_reference's. A weight whose codes have at most 16, 32 or 64 values takes 4, 5 or 6 bits each, any
other 8 bits (without AVX512-BF16: 4 or 8); scales take 8 bits and the file's steps where it has them so, else 16 bits
where float16 holds them exactly. AMX is not used: it sums in another order.
Needs numba.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import cpu_code_decoding as decoding
from outrider.kernels.linear import cpu_code_rows as code_rows
from outrider.kernels.linear import cpu_code_tiles as tiles
from outrider.kernels.linear import cpu_panels
from outrider.kernels.linear.codes import Codes, grouping_of, in_one_order
from outrider.kernels.linear.cpu_code_packing import Part, pack_part, records_of

_ERRORS = {1: "an id names no row of the weight"}


@dataclass(frozen=True)
class PackedParts:
    """Weights packed as one; `panels` has the addresses of the parts."""

    num_outputs: int
    num_inputs: int
    parts: tuple[Part, ...]
    panels: torch.Tensor  # int64 [panels, fields of cpu_code_tiles.PanelFields]
    order: torch.Tensor | None  # int64 [K]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        held = [self.panels, self.order]
        for part in self.parts:
            held += [part.lines, part.table, part.scales, part.minimums, part.scale_steps, part.minimum_steps]
        return sum(tensor.nbytes for tensor in held if tensor is not None)


@dataclass(frozen=True)
class CodePanels(PackedParts):
    """Weights whose products are of bf16."""

    sum_inputs: int  # inputs of a group of the parts with minimums; 0: none has any

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the parts' kinds, sorted."""
        return tuple(sorted({decoding.NAMES[part.kind] for part in self.parts}))


def supports(dtype: torch.dtype) -> bool:
    """Returns whether codes can be multiplied with rows of this dtype on this machine."""
    return cpu_panels.supports(dtype)


def takes(codes: Codes) -> bool:
    """Returns whether the law applies to these codes."""
    return codes.numbers.dtype in (torch.int8, torch.float8_e4m3fn) and codes.grouping is not None


def takes_together(parts: Sequence[Codes]) -> bool:
    """Returns whether weights can be packed as one: `takes` accepts all, and they read their inputs in one order."""
    if not all(map(takes, parts)) or not in_one_order(parts):
        return False
    return len({grouping_of(part).group_inputs for part in parts if _has_minimums(part)}) < 2


def _has_minimums(codes: Codes) -> bool:
    return codes.zeros is not None or codes.minimums is not None


def pack(codes: Sequence[Codes]) -> CodePanels:
    """The weights one below the other. Raises KernelArgumentError: they cannot be packed together."""
    if not takes_together(codes):
        raise KernelArgumentError("these codes cannot be packed as one weight")
    parts = tuple(map(pack_part, codes))
    sum_inputs = max(2 * part.group_lines if part.minimums is not None else 0 for part in parts)
    num_outputs, order = sum(part.num_outputs for part in parts), grouping_of(codes[0]).order
    return CodePanels(num_outputs, codes[0].shape[1], parts, records_of(parts), order, sum_inputs)


_Packed = TypeVar("_Packed", bound=PackedParts)


def outputs(packed: _Packed, start: int, end: int) -> _Packed | None:
    """The outputs [start, end) of the same memory; None: they are no whole panels."""
    edge_of = tiles.PanelFields._fields.index
    first, last = edge_of("first_output"), edge_of("end_output")
    inside = (packed.panels[:, first] >= start) & (packed.panels[:, last] <= end)
    panels = packed.panels[inside]
    if int((panels[:, last] - panels[:, first]).sum()) != end - start:
        return None
    panels[:, [first, last]] -= start
    return replace(packed, num_outputs=end - start, panels=panels)


def linear(x: torch.Tensor, packed: CodePanels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], bias bf16 [N], contiguous, or None; returns bf16 [..., N].

    Raises KernelArgumentError for another width or dtype.
    """
    num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
    out = cpu_panels.empty_output(x, num_outputs, num_inputs)
    num_rows = x.numel() // num_inputs
    if out.numel() == 0:
        return out
    x, x_sums = _prepared(x.contiguous(), packed, num_rows)
    threads = cpu_panels.num_threads(num_outputs * num_inputs, num_rows)
    num_lines = -(-num_inputs // 2)
    call = tiles.CallRecord(
        x.data_ptr(), 4 * num_lines, *_address_and_stride(x_sums), packed.panels.data_ptr(), len(packed.panels),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), 2 * num_outputs, num_rows, num_lines,
        cpu_team.scratch(tiles.SCRATCH_BYTES, threads),
    )  # fmt: skip
    reads = (x,) if x_sums is None else (x, x_sums)
    cpu_team.run(cpu_team.Work(tiles.run_panel, call, (out,), reads, len(packed.panels), threads))
    return out


def _prepared(x: torch.Tensor, packed: CodePanels, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x with an even number of inputs in the codes' order, and the sums of its groups where minimums need them."""
    num_inputs = packed.num_inputs
    ordered = x_sums = None
    if packed.order is not None or num_inputs % 2:
        ordered = x.new_empty((num_rows, num_inputs + num_inputs % 2))
    if packed.sum_inputs:
        x_sums = x.new_empty((num_rows, -(-num_inputs // packed.sum_inputs)), dtype=torch.float32)
    writes = tuple(tensor for tensor in (ordered, x_sums) if tensor is not None)
    if not writes:
        return x, None
    call = code_rows.InputRecord(
        x.data_ptr(), 2 * num_inputs, num_rows, num_inputs, 0 if packed.order is None else packed.order.data_ptr(),
        *_address_and_stride(ordered), *_address_and_stride(x_sums), packed.sum_inputs,
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(code_rows.prepare_rows, call, writes, (x,)))
    return x if ordered is None else ordered, x_sums


def _address_and_stride(rows: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0) * rows.element_size())


def rows(ids: torch.Tensor, packed: CodePanels) -> torch.Tensor:
    """Dequantised weights of the outputs that ids int64 [...] names, bf16 [..., K]: an embedding that shares them.

    Raises KernelArgumentError for packed weights of several parts, or an id outside.
    """
    return decoded_rows(ids, packed, code_rows.decode_row)


def decoded_rows(ids: torch.Tensor, packed: PackedParts, decode_row: Any) -> torch.Tensor:
    """Implements `rows`. decode_row: the unit that decodes one row."""
    if len(packed.parts) > 1 or ids.dtype != torch.int64:
        raise KernelArgumentError("rows of one weight are read by int64 ids")
    out = torch.empty((*ids.shape, packed.num_inputs), dtype=torch.bfloat16)
    ids = ids.contiguous()
    if not ids.numel():
        return out
    error = ctypes.c_int64()
    num_floats = packed.num_inputs + -packed.num_inputs % LANES
    call = code_rows.RowRecord(
        packed.panels.data_ptr(), len(packed.panels), ids.data_ptr(), out.data_ptr(), packed.num_inputs,
        0 if packed.order is None else packed.order.data_ptr(), packed.num_outputs, ctypes.addressof(error),
        cpu_team.scratch(4 * num_floats, 1),
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(decode_row, call, (out,), (ids,), ids.numel(), 1, error=error, errors=_ERRORS))
    return out
