"""Converts scales of a tensor, a row, a group of inputs or a block to scales of groups of inputs for each row."""

from __future__ import annotations

import torch

from outrider.engine.model.quantised.packed_weight import PackedWeight
from outrider.kernels.linear.codes import Codes


def scaled(
    weight: PackedWeight, numbers: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None = None
) -> Codes:
    """Combines numbers [N, K] with their scale.

    block: (outputs, inputs) of one scale; None: one scale per tensor or row. Raises ModelRefused when the scale has
    another shape. Last blocks may be partial.
    """
    outputs, inputs = numbers.shape
    scale = scale.float()
    if block is None:
        if scale.numel() != 1:
            weight.require_shape("its scale", scale.reshape(scale.shape[0], -1).shape, (outputs, 1))
        return Codes(numbers, scale.reshape(-1, 1).expand(outputs, 1), torch.zeros(inputs, dtype=torch.int64))
    wanted = (-(-outputs // block[0]), -(-inputs // block[1]))
    weight.require_shape("its scale", scale.shape, wanted)
    return Codes(numbers, scale.repeat_interleave(block[0], 0)[:outputs], torch.arange(inputs) // block[1])
