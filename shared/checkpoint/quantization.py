"""Finds how a checkpoint folder's weights are quantised, by its JSON files alone, and whether they can be read.

So a checkpoint is refused by the name of its format before a process is started. Not here: reading weights
(engine/model/quantised).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.checkpoint.readable import READABLE
from outrider.shared.errors import ConfigError

# Older exporters write a file next to a config.json that says nothing; file -> the method that writes it.
_SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quant_model_description.json": "ascend",
}
_OLDER_METHODS = {"intel/auto-round": "auto-round"}
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint.

    method: quant_method in lower case, by its present name. settings: the object that has it. file: where it was found.
    """

    method: str
    settings: Mapping[str, Any]
    file: str


def read_quantization(folder: Path) -> Quantization | None:
    """Returns the folder's quantisation; None: no file in it says that the weights are quantised.

    Raises ConfigError for broken files.
    """
    config = read_object(folder / "config.json")
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        settings = source.get("quantization_config")
        if isinstance(settings, dict):
            return Quantization(_method(settings), settings, "config.json")
    for name, method in _SIDE_FILES.items():
        settings = read_object(folder / name)
        if method == "modelopt":
            settings = settings.get("quantization") or {}
            if not isinstance(settings, dict) or settings.get("quant_algo") is None:
                continue  # the KV cache alone
        if settings:
            renamed = {_AWQ_NAMES.get(key, key): value for key, value in settings.items()}
            return Quantization(method, renamed, name)
    return None


def require_readable(folder: Path) -> Quantization | None:
    """Returns read_quantization's result. Raises ConfigError, which names the format, for one that is not read."""
    found = read_quantization(folder)
    if found is not None:
        _require_readable(found)
    return found


def _require_readable(found: Quantization) -> None:
    check = READABLE.get(found.method)
    if check is None:
        raise ConfigError(
            f"its weights are quantised ({found.method}, {found.file}), which is not read. "
            f"Read are {', '.join(sorted(READABLE))}"
        )
    try:
        cause = check(found.settings)
    except (AttributeError, TypeError) as error:
        cause = f"settings of other types than the format has ({error})"
    if cause is not None:
        raise ConfigError(f"its weights are quantised ({found.method}, {found.file}) with {cause}, which is not read")


def _method(settings: Mapping[str, Any]) -> str:
    method = str(settings.get("quant_method") or "method not named").lower()
    return _OLDER_METHODS.get(method, method)
