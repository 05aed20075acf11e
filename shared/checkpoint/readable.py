"""Checks of the quantisation methods' settings; each check names a setting that is not read.

Not here: how they are read (engine/model/quantised).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from outrider.shared.checkpoint import auto_round

Settings = Mapping[str, Any]

_COMPRESSED_FORMATS = {
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
}
_COMPRESSED_STRATEGIES = {None, "tensor", "channel", "group", "block", "tensor_group"}
_MODELOPT_ALGORITHMS = {
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "FP8_BLOCK_SCALES",
    "NVFP4",
    "W4A16_NVFP4",
    "MXFP8",
    "MIXED_PRECISION",
}
_ASCEND_KINDS = {"FLOAT", "W8A16", "W8A8", "W8A8_DYNAMIC", "W8A8_MIX"}
# ggml's names; without IQ1, TQ and NVFP4.
_GGUF_TYPES = {
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
}


def _ascend(settings: Settings) -> str | None:
    """Returns what is not read of quant_model_description.json: tensor's name -> its kind."""
    others = {str(kind) for name, kind in settings.items() if name.endswith(".weight")} - _ASCEND_KINDS
    if others:
        return f"weights of kind {', '.join(sorted(others))[:80]}"
    biases = [name for name in settings if re.search(r"\blayers\.\d+\.\w+_layernorm\.bias$", name)]
    return f"a bias beside a norm ({biases[0][:80]})" if biases else None


def _gptq(settings: Settings) -> str | None:
    if settings.get("is_marlin_format"):
        return "weights repacked for marlin"
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {layout!r}"
    if settings.get("pack_dtype", "int32") != "int32":
        return f"pack_dtype {settings['pack_dtype']!r}"
    changes = (settings.get("dynamic") or {}).values()
    widths = {
        settings.get("bits"),
        *(entry["bits"] for entry in changes if isinstance(entry, dict) and "bits" in entry),
    }
    return _other_widths(widths, {2, 3, 4, 8})


def _awq(settings: Settings) -> str | None:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        return f"version {version!r}"
    return _other_widths({settings.get("bits", 4)}, {4})


def _fp8(settings: Settings) -> str | None:
    if settings.get("fmt", "e4m3") != "e4m3":
        return f"fmt {settings['fmt']!r}"
    if settings.get("expert_dtype", "fp8") != "fp8":
        return f"expert_dtype {settings['expert_dtype']!r}"
    block = settings.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2):
        return f"weight_block_size {block!r}"
    return None


def _compressed_tensors(settings: Settings) -> str | None:
    if settings.get("transform_config"):
        return "a transform_config (rotations of the activations)"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"sparsity_config format {sparsity['format']!r}"
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        return "config_groups that are no objects"
    for layout in (settings.get("format"), *(group.get("format") for group in groups.values())):
        if layout is not None and layout not in _COMPRESSED_FORMATS:
            return f"format {layout!r}"
    for group in groups.values():
        weights = group.get("weights")
        if isinstance(weights, dict) and weights.get("strategy") not in _COMPRESSED_STRATEGIES:
            return f"strategy {weights['strategy']!r}"
    return None


def _modelopt(settings: Settings) -> str | None:
    algorithm = settings.get("quant_algo")
    return None if algorithm in _MODELOPT_ALGORITHMS else f"quant_algo {algorithm!r}"


def _bitsandbytes(settings: Settings) -> str | None:
    if settings.get("load_in_4bit"):
        kind = settings.get("bnb_4bit_quant_type", "fp4")
        return None if kind in ("nf4", "fp4") else f"bnb_4bit_quant_type {kind!r}"
    return None if settings.get("load_in_8bit") else "neither load_in_4bit nor load_in_8bit"


def _gguf(settings: Settings) -> str | None:
    others = sorted(set(settings.get("types") or ()) - _GGUF_TYPES)
    return f"tensors of type {', '.join(others)}" if others else None


def _mxfp4(settings: Settings) -> str | None:
    return None


def _other_widths(found: set[Any], read: set[int]) -> str | None:
    others = sorted(str(width) for width in found - read)
    return f"bits {', '.join(others)}" if others else None


# method -> function that returns the setting that is not read, or None
READABLE: dict[str, Callable[[Settings], str | None]] = {
    "ascend": _ascend,
    "auto-round": auto_round.not_read,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gguf": _gguf,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
