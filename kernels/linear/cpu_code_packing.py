"""Packing of quantised weights, part by part: which kind a part's codes take, and its panels, scales and addresses.

Layouts are those of cpu_code_decoding and cpu_code_tiles. Scales and addresses are packed alike for products in
integers (int8.cpu_panels).
Needs numba.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch.nn.functional import pad

from outrider.kernels.linear import cpu_code_decoding as decoding
from outrider.kernels.linear import cpu_code_tiles as tiles
from outrider.kernels.linear import cpu_panel_coding as coding
from outrider.kernels.linear.codes import CodedFactors, Codes, bytes_in, grouping_of, narrowed

# numbers; packed at once, since packing takes several times their memory
_SLAB_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Part:
    """One weight in panels; layouts in cpu_code_decoding or int8.cpu_lines, and in cpu_code_tiles."""

    kind: int
    num_outputs: int
    group_lines: int
    lines: torch.Tensor  # uint8 [panels, lines, bytes]
    table: torch.Tensor | None
    scales: torch.Tensor  # float16 or float32 [panels, groups, 64]; int8: codes of scales
    minimums: torch.Tensor | None  # of the scales' type
    scale_steps: torch.Tensor | None = None  # of codes: float16 [panels, steps, 64]
    minimum_steps: torch.Tensor | None = None
    base: int = 0  # of int8.cpu_lines


# Scales, minimums, scale_steps and minimum_steps of a part.
Factors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def pack_part(codes: Codes) -> Part:
    """Packs one weight in panels. Raises KernelArgumentError."""
    grouping, numbers = grouping_of(codes), codes.numbers.view(torch.uint8)
    if grouping.order is not None:
        numbers = numbers[:, grouping.order]
    kind, table, lines = _lines(numbers, codes.numbers.dtype)
    size = grouping.group_inputs
    return Part(kind, codes.shape[0], size // 2, lines, table, *factors_of(codes, size))


def factors_of(codes: Codes, size: int) -> Factors:
    """Returns the factors in panels, for groups of `size` inputs; `size` divides the law's groups."""
    grouping, coded = grouping_of(codes), codes.coded_scales
    groups = codes.groups if grouping.order is None else codes.groups[grouping.order]
    if coded is not None and grouping.order is None:
        repeats, rest = divmod(len(groups[::size]), coded.codes.shape[1])
        if not rest and repeats.bit_count() == 1:
            scales, steps = _coded_factors(coded, repeats)
            if codes.coded_minimums is None:
                return scales, None, steps, None
            minimums, minimum_steps = _coded_factors(codes.coded_minimums, repeats)
            return scales, minimums, steps, minimum_steps
    folded = codes.folded_minimums()
    of_groups = None if folded is None else _factors(folded, groups[::size])
    return *narrowed(_factors(codes.scales.float(), groups[::size]), of_groups), None, None


def _lines(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor | None, torch.Tensor]:
    """(kind, table, lines) of numbers [N, K], as bytes."""
    kind, found = decoding.E4M3, list[int]()
    if dtype != torch.float8_e4m3fn:
        is_filled_up = numbers.shape[1] % 2 or len(numbers) % coding.PANEL_COLUMNS
        found = sorted({*bytes_in(numbers), *([0] if is_filled_up else [])})
        kind = decoding.kind_of(len(found))
    index_of = np.zeros(256, dtype=np.uint8)
    index_of[found] = np.arange(len(found), dtype=np.uint8)
    num_panels = -(-len(numbers) // coding.PANEL_COLUMNS)
    lines = torch.empty((num_panels, -(-numbers.shape[1] // 2), decoding.LINE_BYTES[kind]), dtype=torch.uint8)
    end = 0
    for slab in slabs(numbers, 2):
        start, end = end, end + len(slab) // coding.PANEL_COLUMNS
        if kind not in decoding.TABLE_VALUES:
            lines[start:end] = decoding.lines_of_numbers(slab)
            continue
        # numpy's take needs a ninth of the time of torch's.
        indices = torch.from_numpy(np.take(index_of, slab.numpy()))
        lines[start:end] = decoding.lines_of_indices(kind, decoding.lines_of_numbers(indices))
    if kind not in decoding.TABLE_VALUES:
        return kind, None, lines
    values = [float(byte - 256 if byte > 127 else byte) for byte in found]
    return kind, decoding.table_bytes(kind, values), lines


def slabs(numbers: torch.Tensor, line_inputs: int) -> Iterator[torch.Tensor]:
    """The numbers in whole panels of whole lines, where they end filled up with zeros."""
    missing = -numbers.shape[1] % line_inputs
    num_inputs = numbers.shape[1] + missing
    num_panels = max(1, _SLAB_NUMBERS // (num_inputs * coding.PANEL_COLUMNS))
    num_rows = num_panels * coding.PANEL_COLUMNS
    for start in range(0, len(numbers), num_rows):
        slab = numbers[start : start + num_rows]
        yield pad(slab, (0, missing, 0, -len(slab) % coding.PANEL_COLUMNS))


def _factors(of_groups: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [panels, groups of the law, 64]."""
    padded = pad(of_groups[:, group_of], (0, 0, 0, -len(of_groups) % coding.PANEL_COLUMNS))
    return padded.view(-1, coding.PANEL_COLUMNS, len(group_of)).transpose(1, 2).contiguous()


def _coded_factors(factors: CodedFactors, repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, each repeated for `repeats` groups, and steps, in panels."""
    group_of = torch.arange(factors.codes.shape[1]).repeat_interleave(repeats)
    return _factors(factors.codes, group_of), _factors(factors.steps, torch.arange(factors.steps.shape[1]))


def records_of(parts: Sequence[Part]) -> torch.Tensor:
    """int64 [panels, PanelFields], of the parts one below the other."""
    starts = accumulate((part.num_outputs for part in parts[:-1]), initial=0)
    pairs = zip(parts, starts, strict=True)
    return torch.tensor([record for part, start in pairs for record in _records(part, start)])


def _records(part: Part, first_output: int) -> list[tuple[int, ...]]:
    scale_bytes = part.scales.element_size()

    def place(tensor: torch.Tensor | None, panel: int) -> int:
        return 0 if tensor is None else tensor.data_ptr() + panel * tensor[0].nbytes

    return [
        tiles.PanelFields(
            kind=part.kind,
            lines=place(part.lines, panel),
            table=0 if part.table is None else part.table.data_ptr(),
            scales=place(part.scales, panel),
            minimums=place(part.minimums, panel),
            scale_bytes=scale_bytes,
            scale_steps=place(part.scale_steps, panel),
            minimum_steps=place(part.minimum_steps, panel),
            step_shift=0 if part.scale_steps is None else _step_shift(part.scales, part.scale_steps),
            base=part.base,
            group_lines=part.group_lines,
            first_output=first_output + panel * coding.PANEL_COLUMNS,
            end_output=first_output + min((panel + 1) * coding.PANEL_COLUMNS, part.num_outputs),
        )
        for panel in range(len(part.lines))
    ]


def _step_shift(codes: torch.Tensor, steps: torch.Tensor) -> int:
    """log2 of the groups of a step."""
    return (codes.shape[1] // steps.shape[1]).bit_length() - 1
