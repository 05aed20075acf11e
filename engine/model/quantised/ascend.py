"""Ascend (msModelSlim): int8 codes times a scale per output; quant_model_description.json says so of each tensor.

W8A8 stores, in place of the weight's scale, its product with that of the activations: deq_scale, in float16
checkpoints the bits of a float32 in an int64. Activations are not quantised, so their offset and what makes up for it
(quant_bias) are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.scales import scaled
from outrider.kernels.linear.codes import Codes


def codes(weight: PackedWeight, _settings: Mapping[str, Any]) -> Codes:
    """Reads the codes. Raises ModelRefused for other types, and for weights that are not symmetric."""
    if weight.stored_type(".weight") != "I8":
        raise weight.refused(f"it is stored as {weight.stored_type('.weight') or 'nothing'}, not as I8")
    if ".weight_offset" in weight and bool(weight.read(".weight_offset").count_nonzero()):
        raise weight.refused("its weight_offset is not 0")
    return scaled(weight, weight.read(".weight"), _scale(weight))


def _scale(weight: PackedWeight) -> torch.Tensor:
    if ".weight_scale" in weight:
        return weight.read(".weight_scale")
    product = weight.read(".deq_scale")
    if product.dtype == torch.int64:
        product = product.to(torch.int32).view(torch.float32)
    return product.float() / weight.read(".input_scale").float()


FORMAT = Format.of_codes(
    (".weight", ".weight_scale", ".weight_offset", ".deq_scale", ".input_scale"),
    codes,
    (".input_offset", ".quant_bias"),
)
