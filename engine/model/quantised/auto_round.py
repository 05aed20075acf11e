"""AutoRound: weights in GPTQ's or AWQ's layout, with settings by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.quantised import awq, gptq
from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.kernels.linear.codes import Codes
from outrider.shared.checkpoint import auto_round


def codes(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    own = auto_round.of_module(weight.module, settings)
    if auto_round.is_plain(own):
        raise weight.refused(f"it is packed, and its config says {own['bits']} bits")
    layout = auto_round.layout(settings)
    group_size = own.get("group_size", 128)
    if layout == auto_round.AWQ:
        return awq.codes(weight, {"group_size": group_size})
    return gptq.codes(weight, {"bits": own.get("bits", 4), "group_size": group_size, "checkpoint_format": layout})


FORMAT = Format.of_codes((".qweight", ".qzeros", ".scales", ".g_idx"), codes)
