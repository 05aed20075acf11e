"""Reference of the linear on codes, and its law: each group of inputs is one chain in float32, then scaled.

    for each group, in order:   sum = 0; for each pair of inputs: sum += x[odd] * code[odd]; sum += x[even] * code[even]
                                total = fma(sum, scale, total)
                                total = fma(sum of the group's x, minimum, total)    where the weight has minimums
    output = bfloat16(total + bias)

Products are exact in float32: both factors have 8 bits. No weight is rounded. A group of more than 128 inputs counts as
several with the same scale. Zero points are folded into minimums: the fold is exact for 16-bit scales.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear.codes import Codes

_LANES = 16


def linear(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [T, K], bias bf16 [N] or None -> bf16 [T, N], step by step. Raises KernelArgumentError."""
    grouping = codes.grouping
    if grouping is None:
        raise KernelArgumentError("the law does not hold for groups of these sizes")
    order = torch.arange(x.shape[1]) if grouping.order is None else grouping.order
    rows, numbers, minimums = x.float()[:, order], codes.numbers.float()[:, order], codes.folded_minimums()
    if rows.shape[1] % 2:
        rows, numbers = pad(rows, (0, 1)), pad(numbers, (0, 1))
    total = torch.zeros(len(x), codes.shape[0])
    for start in range(0, rows.shape[1], grouping.group_inputs):
        end, group = start + grouping.group_inputs, codes.groups[order[start]]
        total = fma(_chain(rows[:, start:end], numbers[:, start:end]), codes.scales[:, group], total)
        if minimums is not None:
            total = fma(sum_of_inputs(rows[:, start:end])[:, None], minimums[:, group], total)
    return (total if bias is None else total + bias.float()).bfloat16()


def _chain(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(x), len(numbers))
    for even in range(0, x.shape[1], 2):
        for place in (even + 1, even):
            total = total + x[:, place, None] * numbers[:, place]
    return total


def sum_of_inputs(x: torch.Tensor) -> torch.Tensor:
    """float32 [T, k] -> [T]: sixteen chains, one for each lane, then added as a tree of halves."""
    lanes = torch.zeros(len(x), _LANES)
    for part in pad(x, (0, -x.shape[1] % _LANES)).reshape(len(x), -1, _LANES).unbind(1):
        lanes = lanes + part
    for distance in (8, 4, 2, 1):
        lanes = lanes + lanes.roll(-distance, 1)
    return lanes[:, 0]


def fma(left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Computes left * right + addend as a fused multiply-add would.

    The product is exact in float64. The sum is rounded twice, which changes about one result in 2^29.
    """
    return (left.double() * right.double() + addend.double()).float()
