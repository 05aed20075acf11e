"""Reference of the linear in integers, and its law, which CPUs and GPUs follow to the bit.

    for each group of inputs, in order:
        largest  = max(|x|), at least 2**-100; NaN where an x is infinite or NaN
        step     = largest / 127
        q        = x * (127 / largest), rounded to the nearest integer, ties to even; within -127 and 127
        total    = fma(sum of q * code, step * scale, total)
        total    = fma(step * sum of q, minimum, total)          where the weight has minimums
    output = bfloat16(total + bias)

Sums of integers are exact in any order (at most 128 * 127 * 128, which float32 holds); every other operation is one of
float32, rounded once. Groups are those of the weight (Codes.grouping); weights that are packed together are read in
groups of the largest size that divides all of theirs. Zero points are folded into minimums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear.coded_reference import fma
from outrider.kernels.linear.codes import Codes, in_one_order

# largest int8 code; symmetric, so -128 is unused
LARGEST_CODE = 127
# smallest magnitude of a group; keeps 127 / magnitude finite if the group is all zeros
SMALLEST_MAGNITUDE = 2.0**-100
# inputs; the number that one instruction multiplies
QUAD = 4


def group_inputs(parts: Sequence[Codes]) -> int | None:
    """Inputs of a group of weights that are packed together, a multiple of QUAD; None: the law does not hold."""
    if not in_one_order(parts) or any(part.numbers.dtype != torch.int8 for part in parts):
        return None
    common = math.gcd(*(part.grouping.group_inputs for part in parts if part.grouping is not None))
    return None if common % QUAD else common


def quantise(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, K] in groups of `size` inputs, the last one filled up with zeros -> q int8 [T, G, size], steps."""
    groups = pad(x.float(), (0, -x.shape[1] % size)).reshape(len(x), -1, size)
    largest = groups.abs().amax(2).clamp(min=SMALLEST_MAGNITUDE)
    largest = torch.where(groups.isfinite().all(2), largest, torch.nan)
    factor = torch.full_like(largest, LARGEST_CODE) / largest  # torch takes a number over a tensor as a reciprocal
    q = (groups * factor[..., None]).round().nan_to_num(0.0)
    return q.to(torch.int8), largest / LARGEST_CODE


def linear(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None, *, size: int | None = None) -> torch.Tensor:
    """x bf16 [T, K], bias bf16 [N] or None -> bf16 [T, N]. size: inputs of a group; None: of this weight alone.

    Raises KernelArgumentError.
    """
    size, grouping = size or group_inputs([codes]), codes.grouping
    if size is None or grouping is None:
        raise KernelArgumentError("the law in integers does not hold for groups of these sizes")
    order = torch.arange(x.shape[1]) if grouping.order is None else grouping.order
    numbers, minimums = codes.numbers.long()[:, order], codes.folded_minimums()
    q, steps = quantise(x[:, order], size)
    total = torch.zeros(len(x), codes.shape[0])
    for place, start in enumerate(range(0, x.shape[1], size)):
        of_group, group = numbers[:, start : start + size], codes.groups[order[start]]
        step, q_of_group = steps[:, place, None], q[:, place, : of_group.shape[1]].long()
        total = fma((q_of_group @ of_group.T).float(), step * codes.scales[:, group].float(), total)
        if minimums is not None:
            total = fma(step * q_of_group.sum(1, keepdim=True).float(), minimums[:, group], total)
    return (total if bias is None else total + bias.float()).bfloat16()
