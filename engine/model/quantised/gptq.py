"""GPTQ: codes packed along the inputs, zeros along the outputs, one scale per group of inputs and output.

w[n, k] = scales[g, n] * (q - z), g = g_idx[k]. Files of version 1 store z - 1 (AutoGPTQ), version 2 stores z.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.unpack import signed, unpack_stream
from outrider.kernels.linear.codes import Codes, without_zeros


def codes(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    settings = _of_module(weight.module, settings)
    num_bits = int(settings["bits"])
    words, scales = weight.read(".qweight"), weight.read(".scales")
    outputs = words.shape[1]
    inputs = words.shape[0] * 32 // num_bits
    numbers = signed(unpack_stream(words.T, num_bits, inputs), num_bits)
    weight.require_shape("scales", scales.shape, (scales.shape[0], outputs))
    zeros = weight.read(".qzeros")
    weight.require_shape("qzeros", zeros.shape, (scales.shape[0], outputs * num_bits // 32))
    zeros = unpack_stream(zeros, num_bits, outputs).to(torch.int16)
    if settings.get("checkpoint_format", "gptq") == "gptq":
        if bool((zeros == 2**num_bits - 1).any()):
            # Readers differ: some carry into the next number, some wrap around.
            raise weight.refused(f"a stored zero of {2**num_bits - 1}, which version 1 of the format leaves open")
        zeros += 1
    groups = _groups(weight, inputs, scales.shape[0], settings)
    return Codes(numbers, scales.T, groups, without_zeros(zeros.T - 2 ** (num_bits - 1)))


def _groups(weight: PackedWeight, inputs: int, num_groups: int, settings: Mapping[str, Any]) -> torch.Tensor:
    """Returns the group of each input, int64 [K]."""
    if ".g_idx" in weight:
        groups = weight.read(".g_idx").long()
        weight.require_shape("g_idx", groups.shape, (inputs,))
        if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise weight.refused(f"g_idx names groups beyond the {num_groups} that have scales")
        return groups
    group_size = int(settings.get("group_size", -1))
    group_size = inputs if group_size == -1 else group_size
    weight.require_shape("scales", (num_groups,), (-(-inputs // group_size),))
    return torch.arange(inputs) // group_size


def _of_module(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a module's settings: `dynamic` changes them for matching names; "-:" leaves modules plain (GPTQModel)."""
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
            return {**settings, **changes}
    return settings


FORMAT = Format.of_codes((".qweight", ".qzeros", ".scales", ".g_idx"), codes)
