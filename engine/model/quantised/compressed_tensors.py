"""compressed-tensors: packed integers, int8, e4m3, NVFP4, MXFP4 and MXFP8, distinguished by the tensors that are there.

The config gives the number of bits and the kind of scales per group of modules, matched by name. Activations are not
quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.engine.model.quantised import fp8
from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.scales import scaled
from outrider.engine.model.quantised.unpack import doubled_e2m1_pairs, e8m0, signed, unpack_stream
from outrider.kernels.linear.codes import Codes

# inputs; number that share one scale
_NVFP4_GROUP = 16
_MX_GROUP = 32


def codes(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    if ".weight_packed" not in weight:
        return _unpacked(weight, settings)
    if weight.stored_type(".weight_packed") == "U8":
        numbers, scale = doubled_e2m1_pairs(weight.read(".weight_packed")), weight.read(".weight_scale")
        if ".weight_global_scale" in weight:
            scale = scale.float() / weight.read(".weight_global_scale").float()
            return scaled(weight, numbers, scale / 2, (1, _NVFP4_GROUP))
        return scaled(weight, numbers, e8m0(scale) / 2, (1, _MX_GROUP))
    return _integers(weight, _weight_args(weight, settings))


def _unpacked(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    """Reads weights of one code a byte: int8 or e4m3."""
    scale = weight.read(".weight_scale")
    if weight.stored_type(".weight") != "I8":
        numbers = fp8.e4m3(weight)
        if weight.stored_type(".weight_scale") == "U8":
            return scaled(weight, numbers, e8m0(scale), (1, _MX_GROUP))
    else:
        numbers = weight.read(".weight")
    args = _weight_args(weight, settings)
    found = scaled(weight, numbers, scale, _block(args, numbers.shape[1]))
    if ".weight_zero_point" not in weight:
        return found
    zeros = weight.read(".weight_zero_point")
    return replace(found, zeros=_of_groups(weight, zeros.reshape(zeros.shape[0], -1), found))


def _integers(weight: PackedWeight, args: Mapping[str, Any]) -> Codes:
    """Reads weight_packed int32 [N, K * bits / 32]: a stream of q + 2^(bits-1) per output; zeros likewise, along N."""
    num_bits = int(args["num_bits"])
    words = weight.read(".weight_packed")
    outputs, inputs = (int(size) for size in weight.read(".weight_shape").tolist())
    weight.require_shape("weight_packed", words.shape, (outputs, -(-inputs * num_bits // 32)))
    numbers = signed(unpack_stream(words, num_bits, inputs), num_bits)
    scale = weight.read(".weight_scale")
    if ".weight_g_idx" in weight:
        groups = weight.read(".weight_g_idx").long()
        weight.require_shape("weight_g_idx", groups.shape, (inputs,))
        if not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
            raise weight.refused(f"weight_g_idx names groups beyond the {scale.shape[1]} that have scales")
        found = Codes(numbers, scale, groups)
    else:
        found = scaled(weight, numbers, scale, _block(args, inputs))
    if ".weight_zero_point" not in weight:
        return found
    zeros = signed(unpack_stream(weight.read(".weight_zero_point").T, num_bits, outputs).T, num_bits)
    return replace(found, zeros=_of_groups(weight, zeros, found))


def _of_groups(weight: PackedWeight, zeros: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Expands zeros [N or 1, groups or 1] to [N, groups]."""
    rows, num_groups = zeros.shape
    if rows not in (1, codes.shape[0]) or num_groups not in (1, codes.scales.shape[1]):
        raise weight.refused(f"zero points {list(zeros.shape)} do not fit its groups")
    return zeros.expand(codes.scales.shape)


def _block(args: Mapping[str, Any], inputs: int) -> tuple[int, int] | None:
    strategy = args.get("strategy") or ("group" if args.get("group_size") else "tensor")
    if strategy == "block":
        outputs_of_block, inputs_of_block = args["block_structure"]
        return int(outputs_of_block), int(inputs_of_block)
    if strategy in ("group", "tensor_group"):
        group_size = int(args["group_size"])
        return 1, inputs if group_size == -1 else group_size
    return None


def _weight_args(weight: PackedWeight, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments for this module: a target that is its name comes before a pattern, that before a class."""
    by_rank: list[tuple[int, Mapping[str, Any]]] = []
    for group in (settings.get("config_groups") or {}).values():
        for target in group.get("targets") or ():
            if target == weight.module:
                by_rank.append((0, group))
            elif target.startswith("re:"):
                if re.match(target.removeprefix("re:"), weight.module):
                    by_rank.append((1, group))
            elif "." not in target and target[:1].isupper():
                by_rank.append((2, group))
    if not by_rank:
        raise weight.refused("no config group of its quantization_config has it as a target")
    args = min(by_rank, key=lambda found: found[0])[1].get("weights")
    if not isinstance(args, dict):
        raise weight.refused("the config group that it is a target of has no weights")
    return args


FORMAT = Format.of_codes(
    (
        ".weight",
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        ".weight_zero_point",
        ".weight_shape",
        ".weight_g_idx",
    ),
    codes,
    (*fp8.ACTIVATION_SCALES, ".output_zero_point", ".k_zero_point", ".v_zero_point"),
)
