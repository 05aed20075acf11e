"""ModelOpt: FP8 per tensor, per output or by blocks, NVFP4 and MXFP8, distinguished by the tensors that are there.

NVFP4: w = e2m1 * weight_scale (e4m3, per 16 inputs) * weight_scale_2 (of the whole tensor).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.quantised import fp8
from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.scales import scaled
from outrider.engine.model.quantised.unpack import doubled_e2m1_pairs, e8m0
from outrider.kernels.linear.codes import Codes

# inputs; number that share one scale
_NVFP4_GROUP = 16
_MXFP8_GROUP = 32
# outputs, inputs; block that shares one scale
_FP8_BLOCK = (128, 128)


def codes(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    if ".weight_scale_2" in weight:
        scale = weight.read(".weight_scale").float() * weight.read(".weight_scale_2").float()
        return scaled(weight, doubled_e2m1_pairs(weight.read(".weight")), scale / 2, (1, _NVFP4_GROUP))
    numbers, scale = fp8.e4m3(weight), weight.read(".weight_scale")
    if weight.stored_type(".weight_scale") == "U8":
        return scaled(weight, numbers, e8m0(scale), (1, _MXFP8_GROUP))
    is_block = scale.ndim > 1 and scale.numel() > 1 and scale.shape != (numbers.shape[0], 1)
    return scaled(weight, numbers, scale, _FP8_BLOCK if is_block else None)


FORMAT = Format.of_codes((".weight", ".weight_scale", ".weight_scale_2"), codes, fp8.ACTIVATION_SCALES)
