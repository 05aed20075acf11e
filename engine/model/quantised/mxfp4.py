"""MXFP4 of gpt-oss: the experts alone, all of a layer in one tensor; 32 inputs share an exponent.

blocks uint8 [E, N, K/32, 16], scales uint8 [E, N, K/32] -> [E, K, N], as the model has its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.unpack import e2m1_pairs, e8m0


def dequantise(weight: PackedWeight, settings: Mapping[str, Any]) -> torch.Tensor:
    """bfloat16: four-bit numbers times powers of two need no more. Expert by expert, as a layer's are gigabytes."""
    blocks, scales = weight.read("_blocks"), weight.read("_scales")
    weight.require_shape("scales", scales.shape, blocks.shape[:3])
    experts, outputs, groups, _ = blocks.shape
    found = torch.empty(experts, groups * 32, outputs, dtype=torch.bfloat16)
    for expert in range(experts):
        values = e2m1_pairs(blocks[expert]).float() * e8m0(scales[expert])[..., None]
        found[expert] = values.flatten(1).T
    return found


FORMAT = Format(("_blocks", "_scales"), dequantise, target="")
