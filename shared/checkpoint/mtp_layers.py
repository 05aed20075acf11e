"""Finds a target's layers for multi-token prediction (MTP) from its checkpoint's JSON files and tensor names alone.

So method `mtp` is refused with a sentence before a process is started. Not here: reading the tensors and what a layer
is made of (drafting/checkpoints/mtp.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.shared.checkpoint.file_names import linked_parts, weight_files
from outrider.shared.checkpoint.json_file import read_object, text_config
from outrider.shared.errors import ConfigError

_HEADER_LEN_BYTES = 8
# bytes; safetensors' own limit
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class MtpNames:
    """The names of a model family's MTP layers.

    count_key: in config.json. pattern: start of a tensor's name; its group is the layer's number, if the name has one.
    follows_layers: that number continues from num_hidden_layers. absent_count: what config.json means without the key.
    """

    count_key: str
    pattern: str
    follows_layers: bool = False
    absent_count: int = 0

    def num_layers(self, config: dict[str, Any]) -> Any:
        """Returns what config.json says is the number of the target's own layers; Nemotron-H may list them instead."""
        return config.get("num_hidden_layers", None if self.follows_layers else 0)

    def layer_of(self, name: str, num_hidden_layers: int) -> int | None:
        """The number of the MTP layer, from 0, that a tensor belongs to; None: it belongs to none."""
        match = re.match(self.pattern, name)
        if match is None:
            return None
        number = int(match[1] or 0) - (num_hidden_layers if self.follows_layers else 0)
        return number if number >= 0 else None


_AFTER_LAYERS = MtpNames("num_nextn_predict_layers", r"model\.layers\.(\d+)\.", follows_layers=True)
_QWEN3_5 = MtpNames("mtp_num_hidden_layers", r"mtp\.(?:layers\.(\d+)\.)?")
# model_type of the text model's config -> names
MTP_NAMES = {
    "bailing_hybrid": _AFTER_LAYERS,
    "deepseek_v3": _AFTER_LAYERS,
    "deepseek_v32": _AFTER_LAYERS,
    "dots3_note_text": replace(_AFTER_LAYERS, absent_count=1),
    "exaone_moe": replace(_QWEN3_5, count_key="num_nextn_predict_layers"),
    "ernie4_5_moe": MtpNames("num_nextn_predict_layers", r"model\.mtp_\w+\.(\d+)\."),
    "glm4_moe": _AFTER_LAYERS,
    "glm4_moe_lite": _AFTER_LAYERS,
    "glm_moe_dsa": _AFTER_LAYERS,
    "glm_ocr_text": replace(_AFTER_LAYERS, pattern=r"model\.language_model\.layers\.(\d+)\."),
    "hy_v3": _AFTER_LAYERS,
    "mimo_v2_flash": MtpNames("num_nextn_predict_layers", r"model\.mtp\.layers\.(\d+)\.", absent_count=1),
    "nemotron_h": MtpNames("num_nextn_predict_layers", r"mtp\.()"),
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": MtpNames("num_nextn_predict_layers", _QWEN3_5.pattern, absent_count=1),
    "step3p5": _AFTER_LAYERS,
}
# The config of a model with images -> that of its text model, where "text_config" does not say it.
_TEXT_TYPES = {
    "dots3_note": "dots3_note_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step3p7": "step3p5",
}


def has_mtp_layers(folder: Path) -> bool:
    """Returns whether `count_mtp_layers` finds any; False if the tensor names are in pickles."""
    try:
        return count_mtp_layers(folder) > 0 and _tensor_names(folder) is not None
    except ConfigError:
        return False


def count_mtp_layers(folder: Path) -> int:
    """Returns the number of MTP layers, at least 1. Raises ConfigError, a sentence for the user: none can be read."""
    known, config = _family(folder)
    return require_consistent(known, config, _tensor_names(folder))


def stores_mtp_layer(folder: Path) -> bool:
    """Returns whether a target of a family with MTP layers has one in its files; a copy may lack it.

    Raises ConfigError: of this family none are read, config.json denies the layer, or the names are in pickles.
    """
    known, config = _family(folder)
    names = _tensor_names(folder)
    if names is None:
        raise ConfigError("its tensors are not in *.safetensors, so MTP layers are not looked for")
    num_layers = known.num_layers(config)
    if not any(isinstance(num_layers, int) and known.layer_of(name, num_layers) is not None for name in names):
        return False
    return require_consistent(known, config, names) > 0


def _family(folder: Path) -> tuple[MtpNames, dict[str, Any]]:
    """Returns the names of the family's MTP layers, and the text model's part of config.json. Raises ConfigError."""
    if linked_parts(folder):
        raise ConfigError("method mtp needs the target's MTP layers, and those of a .gguf file are not read")
    whole = read_object(folder / "config.json")
    config = text_config(whole)
    model_type = str(config.get("model_type"))
    model_type = _TEXT_TYPES.get(str(whole.get("model_type")), _TEXT_TYPES.get(model_type, model_type))
    known = MTP_NAMES.get(model_type)
    if known is None:
        raise ConfigError(
            f"method mtp needs a target with MTP layers, and none are read of model type {model_type}; "
            f"they are of {', '.join(MTP_NAMES)}"
        )
    return known, config


def require_consistent(known: MtpNames, config: dict[str, Any], tensor_names: Collection[str] | None) -> int:
    """The number of MTP layers that config.json and the tensors agree on; tensor_names None: config.json's alone.

    Raises ConfigError that names the key and a tensor.
    """
    count = config.get(known.count_key, known.absent_count) or 0
    num_layers = known.num_layers(config)
    if not isinstance(count, int) or not isinstance(num_layers, int):
        raise ConfigError(f"{known.count_key} and num_hidden_layers of its config.json must be whole numbers")
    numbers = {name: layer for name in tensor_names or () if (layer := known.layer_of(name, num_layers)) is not None}
    found = sorted(numbers)
    if found and known.absent_count and known.count_key not in config:
        count = 1 + max(numbers.values())
    if not count and found:
        raise ConfigError(
            f"it has tensors of MTP layers ({found[0]}), but {known.count_key} of its config.json is "
            f"{config.get(known.count_key, 'absent')}; set the number of layers there"
        )
    if count and tensor_names is not None and not found:
        raise ConfigError(
            f"{known.count_key} of its config.json is {count}, but it has no tensor of an MTP layer: "
            "they were left out of this copy; use the original checkpoint, or another method than mtp"
        )
    if count < 1:
        raise ConfigError("the target has no MTP layers, so method mtp cannot draft for it; use another method")
    return count


def _tensor_names(folder: Path) -> Collection[str] | None:
    """Returns the tensor names from the index or the file headers; None: they are in pickles. Raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_object(index).get("weight_map")
        return names if isinstance(names, dict) else None
    files = weight_files(folder)
    if any(file.suffix != ".safetensors" for file in files):
        return None
    return [name for file in files for name in _header(file)]


def _header(file: Path) -> dict[str, Any]:
    """Returns a safetensors file's header. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_HEADER_LEN_BYTES), "little")
            found = json.loads(opened.read(length)) if length <= _LONGEST_HEADER_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a safetensors file")
    return found
