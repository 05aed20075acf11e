"""AutoRound's quantization objects: the layout of the packed weights, the settings of one module, what is not read.

The layouts are GPTQ's and AWQ's; packing_format names which, and how zero points are stored. Files up to auto-round 0.4
name it `backend`, with the name of a kernel behind it. Not here: reading weights (engine/model/quantised/auto_round).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

AWQ = "awq"
# -> the layout: GPTQ's checkpoint_format, whose first version stores zero points less 1, or AWQ's (auto-round 0.16,
# inference/backend.py: GPTQ_FORMAT, GPTQ_FORMAT_NO_ZP, AWQ_FORMAT).
_LAYOUTS = {
    "auto": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:awq": AWQ,
    "auto_round:auto_awq": AWQ,
}
_KERNELS = re.compile(r":(exllamav2|triton|tritonv2)$")
_DATA_TYPES = {"int", "int_sym", "int_asym"}
_WIDTHS = {"gptq": range(2, 9), "gptq_v2": range(2, 9), AWQ: (4,)}
_ROTATIONS = ("rotation_config", "rotation_configs", "spinquant_config")
_PLAIN_BITS = 16  # and more: the weight is not packed


def layout(settings: Settings) -> str | None:
    """Returns the layout, "gptq", "gptq_v2" or AWQ; None: one that is not read."""
    return _LAYOUTS.get(_KERNELS.sub("", _packing_format(settings)))


def of_module(module: str, settings: Settings) -> Settings:
    """Returns the settings of a module.

    extra_config may override them by the module's name, or by a pattern found in it; the first match applies.
    """
    extra = settings.get("extra_config") or {}
    changes = extra.get(module)
    if changes is None:
        changes = next((extra[pattern] for pattern in extra if extra[pattern] and _found(pattern, module)), {})
    return {**settings, **changes}


def is_plain(settings: Settings) -> bool:
    """Returns whether a module with these settings is not packed."""
    bits = settings.get("bits")
    return isinstance(bits, int) and bits >= _PLAIN_BITS


def not_read(settings: Settings) -> str | None:
    """Returns the first setting that is not read; None: all are read."""
    found = layout(settings)
    if found is None:
        return f"packing_format {_packing_format(settings)!r}"
    for name in _ROTATIONS:
        if settings.get(name):
            return f"a {name} (rotations of the activations)"
    for changes in ({}, *(settings.get("extra_config") or {}).values()):
        cause = _not_read_of_module({**settings, **changes}, found)
        if cause is not None:
            return cause
    return None


def _not_read_of_module(settings: Settings, found: str) -> str | None:
    if is_plain(settings):
        return None
    if settings.get("data_type", "int") not in _DATA_TYPES:
        return f"data_type {settings['data_type']!r}"
    if settings.get("act_bits") is not None and settings["act_bits"] < _PLAIN_BITS:
        return f"act_bits {settings['act_bits']}"
    bits, group_size = settings.get("bits", 4), settings.get("group_size", 128)
    if bits not in _WIDTHS[found]:
        return f"bits {bits} in the layout {_packing_format(settings)!r}"
    if not isinstance(group_size, int) or (group_size != -1 and group_size < 1):
        return f"group_size {group_size!r}"
    return None


def _packing_format(settings: Settings) -> str:
    return str(settings.get("packing_format") or settings.get("backend") or "auto")


def _found(pattern: str, module: str) -> bool:
    try:
        return re.search(pattern, module) is not None
    except re.error:
        return False
