"""bitsandbytes: four bits from a table of sixteen levels, or int8 with a scale per output.

4 bits: the weight is flattened, two numbers a byte, the first in the high half; w = level * absmax of its block. absmax
may be quantised too, with its own table, blocks and offset. int8: w = q * SCB / 127; the outlier columns, which depend
on the batch, are not split off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


def dequantise(weight: PackedWeight, settings: Mapping[str, Any]) -> torch.Tensor:
    if ".SCB" in weight:
        codes, scale = weight.read(".weight"), weight.read(".SCB").float()
        weight.require_shape("SCB", scale.shape, codes.shape[:1])
        return codes.float() * (scale / 127)[:, None]
    state_part = next((part for part in _STATES if part in weight), _STATES[0])
    state = json.loads(bytes(weight.read(state_part).tolist()))
    levels, data = weight.read(".weight.quant_map").float(), weight.read(".weight").flatten()
    values = torch.stack((levels[(data >> 4).int()], levels[(data & 15).int()]), dim=-1).flatten()
    absmax = _absmax(weight, state).repeat_interleave(int(state["blocksize"]))
    shape = [int(size) for size in state["shape"]]
    count = shape[0] * shape[1]
    weight.require_shape("weight", (values.numel(),), (count + count % 2,))
    if absmax.numel() < count:
        raise weight.refused(f"absmax covers {absmax.numel()} of its {count} numbers")
    return (values[:count] * absmax[:count]).reshape(shape)


def _absmax(weight: PackedWeight, state: Mapping[str, Any]) -> torch.Tensor:
    """Returns the blocks' scales, float32 [number of blocks]."""
    absmax = weight.read(".weight.absmax")
    if absmax.dtype != torch.uint8:
        return absmax.float()
    levels, outer = weight.read(".weight.nested_quant_map").float(), weight.read(".weight.nested_absmax").float()
    outer = outer.repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
    return levels[absmax.int()] * outer + float(state["nested_offset"])


_TABLES = (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
FORMAT = Format((".weight", ".SCB", *_TABLES, *_STATES), dequantise, (".weight_format",))
