"""MXFP4 of gpt-oss: only experts, all of a layer in one tensor; 32 inputs share an exponent.

blocks uint8 [E, N, K/32, 16], scales uint8 [E, N, K/32] -> [E, K, N], as the model has its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.scales import scaled
from outrider.engine.model.quantised.unpack import doubled_e2m1_pairs, e2m1_pairs, e8m0
from outrider.kernels.linear.codes import Codes

_GROUP = 32  # inputs of one scale


def expert_codes(weight: PackedWeight, expert: int) -> Codes:
    """Returns one expert's codes [N, K]."""
    blocks, scales = _tensors(weight)
    numbers = doubled_e2m1_pairs(blocks[expert].flatten(1))
    return scaled(weight, numbers, e8m0(scales[expert]) / 2, (1, _GROUP))


def dequantise(weight: PackedWeight, settings: Mapping[str, Any]) -> torch.Tensor:
    """Dequantises to bfloat16, which is exact for four-bit numbers times powers of two. Works expert by expert, as a
    layer's experts take gigabytes."""
    blocks, scales = _tensors(weight)
    experts, outputs, groups, _ = blocks.shape
    found = torch.empty(experts, groups * _GROUP, outputs, dtype=torch.bfloat16)
    for expert in range(experts):
        values = e2m1_pairs(blocks[expert]).float() * e8m0(scales[expert])[..., None]
        found[expert] = values.flatten(1).T
    return found


def _tensors(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, scales = weight.read("_blocks"), weight.read("_scales")
    weight.require_shape("scales", scales.shape, blocks.shape[:3])
    return blocks, scales


FORMAT = Format(("_blocks", "_scales"), dequantise, target="", expert_codes=expert_codes)
