"""A quantised weight as its file has it: small exact numbers; scales, zero points and minimums by groups of inputs.

Not here: file formats (engine/model), and the arithmetic of linears on codes (coded_reference, cpu_code_panels,
triton_codes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from outrider.kernels.errors import KernelArgumentError

# inputs; longest chain of the law (coded_reference), so that a decoded group fits L1 (64 lines of 256 bytes)
MAX_GROUP_INPUTS = 128
# numbers; counted at once, where counting takes several times their memory
_SLAB_NUMBERS = 4_000_000
# inputs; smallest group that a cut makes: two float32 factors for 8 codes of 4 bits are 1.5 bytes a weight, what 12-bit
# panels of the dequantised weight take (cpu_panels)
MIN_CUT_INPUTS = 8


@dataclass(frozen=True)
class Grouping:
    """The order and groups in which the law reads a weight's inputs.

    One group of the file may be several groups of the law, which share its scale.

    """

    order: torch.Tensor | None  # int64 [K]; the inputs group by group; None: unchanged
    group_inputs: int  # inputs of one chain, even; the last chain may be shorter


def without_zeros(zeros: torch.Tensor) -> torch.Tensor | None:
    """The zero points; None: all are 0."""
    return zeros if bool(zeros.any()) else None


@dataclass(frozen=True)
class CodedFactors:
    """Scales or minimums [N, G] that a file has as codes of their own, times steps of several groups (GGUF's K types).

    codes: int8 [N, G]. steps: float16 [N, S], each of G / S groups, a power of two. A product is exact in float32.
    """

    codes: torch.Tensor
    steps: torch.Tensor

    @property
    def groups_per_step(self) -> int:
        return self.codes.shape[1] // self.steps.shape[1]

    def values(self) -> torch.Tensor:
        """float32 [N, G]"""
        return self.codes.float() * self.steps.float().repeat_interleave(self.groups_per_step, 1)

    def rows(self, index: torch.Tensor) -> CodedFactors:
        """Returns the factors of the outputs in index, int64 [n], in that order."""
        return CodedFactors(self.codes[index], self.steps[index])

    def of_groups(self, kept: torch.Tensor) -> CodedFactors:
        """Returns the factors of the groups in kept, int64 [n], in that order.

        A step is repeated where fewer groups share it than before.
        """
        step_of, run = kept // self.groups_per_step, self.groups_per_step
        while len(kept) % run or not torch.equal(step_of, step_of[::run].repeat_interleave(run)):
            run //= 2
        return CodedFactors(self.codes[:, kept], self.steps[:, step_of[::run]])


@dataclass(frozen=True)
class Codes:
    """A quantised weight [N, K] = (numbers - zeros) * scales + minimums; all but numbers are per group of inputs.

    numbers: int8 or float8_e4m3fn [N, K], each exact in bfloat16. scales: float [N, G]. groups: int64 [K], 0 to G - 1.
    zeros: whole numbers [N, G]. minimums: float [N, G]. coded_scales, coded_minimums: the same values in the file's
    coding; where they are set, zeros is None, and both are set if there are minimums.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor
    zeros: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    coded_scales: CodedFactors | None = None
    coded_minimums: CodedFactors | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.numbers.shape[0], self.numbers.shape[1]

    def rows(self, index: torch.Tensor) -> Codes:
        """The outputs that index int64 [n] names, in its order."""
        zeros, minimums = (None if part is None else part[index] for part in (self.zeros, self.minimums))
        numbers = self.numbers.view(torch.uint8)[index].view(self.numbers.dtype)
        coded = (None if part is None else part.rows(index) for part in (self.coded_scales, self.coded_minimums))
        return Codes(numbers, self.scales[index], self.groups, zeros, minimums, *coded)

    def columns(self, index: torch.Tensor) -> Codes:
        """The inputs that index int64 [K] names, in its order: all, each once."""
        numbers, groups = self.numbers.view(torch.uint8)[:, index].view(self.numbers.dtype), self.groups[index]
        order = torch.unique_consecutive(groups)
        if len(order) != self.scales.shape[1]:
            return replace(self, numbers=numbers, groups=groups)
        # Groups that stay whole are numbered in the new order, so that inputs are read as they come.
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return self._with_factors(numbers, place[groups], order)

    def inputs(self, start: int, end: int) -> Codes:
        """The inputs [start, end).

        A start inside a group splits all groups into equal ones, with a border there, unless they would be too small.
        """
        kept, groups = torch.unique(self.groups[start:end], return_inverse=True)
        size = int(torch.bincount(self.groups).max())
        part = math.gcd(size, start)
        in_turn = torch.equal(self.groups, torch.arange(len(self.groups)) // size)
        if len(kept) > 1 and in_turn and part >= MIN_CUT_INPUTS:
            kept, groups = self.groups[start:end:part], torch.arange(end - start) // part
        numbers = self.numbers.view(torch.uint8)[:, start:end].contiguous().view(self.numbers.dtype)
        return self._with_factors(numbers, groups, kept)

    def _with_factors(self, numbers: torch.Tensor, groups: torch.Tensor, kept: torch.Tensor) -> Codes:
        """numbers whose groups are those that kept int64 [G] names."""
        zeros, minimums = (None if part is None else part[:, kept] for part in (self.zeros, self.minimums))
        coded = (None if part is None else part.of_groups(kept) for part in (self.coded_scales, self.coded_minimums))
        return Codes(numbers, self.scales[:, kept], groups, zeros, minimums, *coded)

    def dequantised(self) -> torch.Tensor:
        """float32 [N, K]."""
        values = self.numbers.float()
        if self.zeros is not None:
            values -= self.zeros.float()[:, self.groups]
        values *= self.scales.float()[:, self.groups]
        if self.minimums is not None:
            values += self.minimums.float()[:, self.groups]
        return values

    def folded_minimums(self) -> torch.Tensor | None:
        """Returns float32 [N, G]: minimums - zeros * scales, which a weight adds to number * scale; None: all are 0."""
        if self.zeros is None:
            return None if self.minimums is None else self.minimums.float()
        folded = -(self.zeros.float() * self.scales.float())
        return folded if self.minimums is None else folded + self.minimums.float()

    @cached_property
    def grouping(self) -> Grouping | None:
        """The order and group size that the law uses.

        None: the law does not apply, because groups other than the last differ in size, or no even size divides them.
        """
        num_inputs, num_groups = len(self.groups), self.scales.shape[1]
        size = int(torch.bincount(self.groups).max())
        order = torch.argsort(self.groups, stable=True)
        if not torch.equal(self.groups[order], torch.arange(num_inputs) // size):
            return None
        as_they_are = torch.equal(order, torch.arange(num_inputs))
        if num_groups == 1:
            part: int | None = min(MAX_GROUP_INPUTS, num_inputs + num_inputs % 2)
        else:
            evens = range(min(MAX_GROUP_INPUTS, size) // 2 * 2, 1, -2)
            part = next((even for even in evens if size % even == 0), None)
        return None if part is None else Grouping(None if as_they_are else order, part)


def grouping_of(codes: Codes) -> Grouping:
    """Returns the grouping of codes. Raises KernelArgumentError: the law does not apply to them."""
    if codes.grouping is None:
        raise KernelArgumentError("the law does not hold for groups of these sizes")
    return codes.grouping


def narrowed(scales: torch.Tensor, minimums: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 factors in float16 where it holds all of them exactly."""
    factors = [scales] if minimums is None else [scales, minimums]
    if not all(torch.equal(values.half().float(), values) for values in factors):
        return scales, minimums
    return scales.half(), None if minimums is None else minimums.half()


def stacked(parts: Sequence[Codes]) -> Codes:
    """Weights with the same groups, of the same types and with the same factors, one below the other."""

    def together(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(found) if len(found) == len(tensors) else None

    def coded(factors: Sequence[CodedFactors | None]) -> CodedFactors | None:
        found = [each for each in factors if each is not None]
        if len(found) < len(factors):
            return None
        return CodedFactors(torch.cat([each.codes for each in found]), torch.cat([each.steps for each in found]))

    return Codes(
        torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(parts[0].numbers.dtype),
        torch.cat([part.scales for part in parts]),
        parts[0].groups,
        together([part.zeros for part in parts]),
        together([part.minimums for part in parts]),
        coded([part.coded_scales for part in parts]),
        coded([part.coded_minimums for part in parts]),
    )


def in_one_order(parts: Sequence[Codes]) -> bool:
    """Returns whether the law applies to all weights and they have the same number of inputs, in one order."""
    groupings = [part.grouping for part in parts]
    if None in groupings or len({part.shape[1] for part in parts}) > 1:
        return False
    orders = [None if grouping is None else grouping.order for grouping in groupings]
    return all(
        order is orders[0] or (order is not None and orders[0] is not None and torch.equal(order, orders[0]))
        for order in orders
    )


def bytes_in(codes: torch.Tensor) -> list[int]:
    """Returns the distinct bytes of uint8 codes, ascending."""
    slabs = torch.tensor_split(codes.flatten(), -(-codes.numel() // _SLAB_NUMBERS))
    counts = torch.stack([torch.bincount(slab, minlength=256) for slab in slabs])
    return counts.sum(0).nonzero().flatten().tolist()
