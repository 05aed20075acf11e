"""The layout of quantised weights in a GPU's memory, for triton_codes.

Inputs are cut into blocks, one group of the law each, filled up with codes that meet zeros to 16, 32, 64 or 128. Codes
lie block by block, in a block output by output, so that a program's tile is one piece of memory. Codes of 4 bits: the
low halves of a block's bytes are the first half of its inputs, the high halves the second. Two groups of at most 16
inputs make one block. For products in integers (int8.triton), 32 stands for 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear.codes import Codes, bytes_in, grouping_of, in_one_order, narrowed, stacked

# values that 4 bits tell apart
_MAX_VALUES = 16
# inputs; least of a tl.dot
_MIN_WIDTH = 16


@dataclass(frozen=True)
class Part:
    """Weights of one kind, one below the other."""

    kind: str  # "range": 4 bits, number = code + low; "table": 4 bits; "i8", "e4m3": the number's own byte
    num_outputs: int
    group_inputs: int  # of the law
    scale_groups: int  # groups of the law that share a scale
    low: int
    table: torch.Tensor | None  # "table": int64 [2], the numbers as 16 bytes
    codes: torch.Tensor  # uint8 [blocks, N, width]
    scales: torch.Tensor  # float16 or float32 [groups, N], a group of zeros at the end if blocks have one too many
    minimums: torch.Tensor | None  # as scales

    @property
    def is_narrow(self) -> bool:
        """True if codes have 4 bits."""
        return self.kind in ("range", "table")

    @property
    def has_two_groups(self) -> bool:
        """True if a block has two groups."""
        return self.is_narrow and self.group_inputs <= self.codes.shape[2]

    @property
    def num_groups(self) -> int:
        """Groups of the law in all blocks, counting a padding group in the last block of two."""
        return self.codes.shape[0] * (2 if self.has_two_groups else 1)

    def pads(self, num_inputs: int) -> bool:
        """Returns whether some codes are padding and belong to no input."""
        return self.codes.shape[0] * self.codes.shape[2] * (2 if self.is_narrow else 1) > num_inputs


@dataclass(frozen=True)
class CodeBlocks:
    """Weights packed as one linear."""

    num_outputs: int
    num_inputs: int
    parts: tuple[Part, ...]
    order: torch.Tensor | None  # int64 [K]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        held = [self.order]
        for part in self.parts:
            held += [part.codes, part.table, part.scales, part.minimums]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the parts' kinds, sorted, as of the CPU's."""
        return tuple(sorted({"i4" if part.is_narrow else part.kind for part in self.parts}))


def takes_together(parts: Sequence[Codes]) -> bool:
    """Returns whether weights can be packed as one."""
    return in_one_order(parts)


def pack(
    codes: Sequence[Codes],
    device: torch.device | str = "cpu",
    *,
    group_inputs: int | None = None,
    min_width: int = _MIN_WIDTH,
) -> CodeBlocks:
    """The weights one below the other, on device. Raises KernelArgumentError: they cannot be packed together.

    group_inputs: of all weights, a divisor of the law's groups; None: the law's own. min_width: a power of two.
    """
    if not takes_together(codes):
        raise KernelArgumentError("these codes cannot be packed as one weight")
    parts = tuple(_pack(run, values, device, group_inputs, min_width) for run, values in _runs(codes))
    order = grouping_of(codes[0]).order
    return CodeBlocks(
        sum(part.num_outputs for part in parts), codes[0].shape[1], parts, None if order is None else order.to(device)
    )


def outputs(packed: CodeBlocks, start: int, end: int) -> CodeBlocks | None:
    """The outputs [start, end) of the same memory; None, as blocks hold all outputs side by side."""
    return None


# Numbers that a weight has; None: e4m3, of which it may have any.
_Values = frozenset[int] | None


def _runs(codes: Sequence[Codes]) -> list[tuple[Codes, _Values]]:
    """Merges neighbours that differ only in their numbers into one weight, which takes one launch."""
    runs: list[tuple[Codes, _Values]] = []
    for part in codes:
        values = _values(part)
        if runs and _is_alike(runs[-1][0], part):
            before, their_values = runs[-1]
            both = None if values is None or their_values is None else values | their_values
            if _is_narrow(values) == _is_narrow(their_values) == _is_narrow(both):
                runs[-1] = stacked([before, part]), both
                continue
        runs.append((part, values))
    return runs


def _values(codes: Codes) -> _Values:
    if codes.numbers.dtype != torch.int8:
        return None
    found = bytes_in(codes.numbers.view(torch.uint8))
    return frozenset(byte - 256 if byte > 127 else byte for byte in found)


def _is_narrow(values: _Values) -> bool:
    return values is not None and len(values) <= _MAX_VALUES


def _is_alike(first: Codes, second: Codes) -> bool:
    def types(codes: Codes) -> list[torch.dtype | None]:
        parts = (codes.numbers, codes.scales, codes.zeros, codes.minimums)
        return [None if part is None else part.dtype for part in parts]

    return types(first) == types(second) and torch.equal(first.groups, second.groups)


def _pack(codes: Codes, values: _Values, device: torch.device | str, group_inputs: int | None, min_width: int) -> Part:
    grouping = grouping_of(codes)
    size = group_inputs or grouping.group_inputs
    numbers = codes.numbers.view(torch.uint8)
    if grouping.order is not None:
        numbers = numbers[:, grouping.order]
    kind, low, table, numbers = _coded(numbers, values)
    blocks = _blocks(numbers, size, min_width, is_narrow=_is_narrow(values))
    num_scales = codes.scales.shape[1]
    num_groups = -(-codes.shape[1] // size)
    scale_groups = num_groups if num_scales == 1 else int(torch.bincount(codes.groups).max()) // size
    scales, minimums = codes.scales.float(), codes.folded_minimums()
    scales, minimums = narrowed(scales, minimums)
    part = Part(
        kind, codes.shape[0], size, scale_groups, low,
        None if table is None else table.to(device), blocks.to(device),
        _by_group(scales).to(device), None if minimums is None else _by_group(minimums).to(device),
    )  # fmt: skip
    missing = -(-part.num_groups // scale_groups) - num_scales
    if missing:
        minimums = None if part.minimums is None else pad(part.minimums, (0, 0, 0, missing))
        part = replace(part, scales=pad(part.scales, (0, 0, 0, missing)), minimums=minimums)
    return part


def _coded(numbers: torch.Tensor, values: _Values) -> tuple[str, int, torch.Tensor | None, torch.Tensor]:
    """(kind, low, table, codes uint8 [N, K]) of numbers, as bytes."""
    if values is None or not _is_narrow(values):
        return "e4m3" if values is None else "i8", 0, None, numbers
    low, high = min(values), max(values)
    if high - low < _MAX_VALUES:
        return "range", low, None, numbers - (low % 256)  # of uint8: by modulus
    ordered = sorted(values)
    table = torch.zeros(_MAX_VALUES, dtype=torch.int8)
    table[: len(ordered)] = torch.tensor(ordered, dtype=torch.int8)
    index_of = np.zeros(256, dtype=np.uint8)
    index_of[[value % 256 for value in ordered]] = np.arange(len(ordered), dtype=np.uint8)
    return "table", 0, table.view(torch.int64), torch.from_numpy(np.take(index_of, numbers.numpy()))


def _blocks(codes: torch.Tensor, group_inputs: int, min_width: int, *, is_narrow: bool) -> torch.Tensor:
    """uint8 [N, K] -> [blocks, N, width]"""
    num_outputs, num_inputs = codes.shape
    filled = max(min_width, 1 << (group_inputs - 1).bit_length())
    groups = pad(codes, (0, -num_inputs % group_inputs)).view(num_outputs, -1, group_inputs)
    groups = pad(groups, (0, filled - group_inputs))
    if not is_narrow:
        return groups.transpose(0, 1).contiguous()
    if filled == min_width:
        groups = pad(groups, (0, 0, 0, groups.shape[1] % 2))
    halves = groups.reshape(num_outputs, -1, 2, max(min_width, filled // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1).contiguous()


def _by_group(of_groups: torch.Tensor) -> torch.Tensor:
    return of_groups.t().contiguous()
