"""FP8 of DeepSeek, Qwen3-FP8 and vLLM: e4m3 codes times a scale per block, per tensor or per output.

The name weight_scale_inv misleads: it multiplies. Activations are not quantised, so their scales are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.scales import scaled
from outrider.engine.model.quantised.unpack import e8m0
from outrider.kernels.linear.codes import Codes

ACTIVATION_SCALES = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".act_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


def codes(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    """Reads the codes. settings: weight_block_size [outputs, inputs]; without it, one scale per tensor or output."""
    block = settings.get("weight_block_size")
    scale_part = ".weight_scale_inv" if ".weight_scale_inv" in weight else ".weight_scale"
    scale = weight.read(scale_part)
    if weight.stored_type(scale_part) in ("U8", "F8_E8M0"):
        scale = e8m0(scale)
    return scaled(weight, e4m3(weight), scale, None if block is None else (int(block[0]), int(block[1])))


def e4m3(weight: PackedWeight) -> torch.Tensor:
    """Returns the codes of `.weight`, float8_e4m3 [N, K]."""
    if weight.stored_type(".weight") != "F8_E4M3":
        raise weight.refused(f"it is stored as {weight.stored_type('.weight') or 'nothing'}, not as F8_E4M3")
    return weight.read(".weight")


FORMAT = Format.of_codes((".weight", ".weight_scale_inv", ".weight_scale"), codes, ACTIVATION_SCALES)
