"""Tells draft heads from models, and checks by sizes whether a head fits a target; no weights are read.

Not here: which kind of head it is, and all that its loader checks (drafting/checkpoints, which needs torch).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.shared.checkpoint.file_names import linked_parts, weight_files
from outrider.shared.checkpoint.json_file import read_object, text_config
from outrider.shared.errors import ConfigError

_NAMED = re.compile(r"eagle|medusa|speculator|dflash|dspark|mtp", re.IGNORECASE)
# Tensors that only heads have, by kind: EAGLE-1 and 3, EAGLE-3, Medusa, MLP speculator.
_TENSORS = re.compile(
    r"fc\.weight|midlayer\.|layers\.0\.hidden_norm\.|medusa_heads\.|\d+\.\d+\.linear\.|speculator\.(emb|proj|ln|head)\."
)
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def require_model(folder: Path, setting: str) -> None:
    """Checks that a folder has a model. Raises ConfigError that names the setting: no checkpoint, or a draft head's."""
    if folder.is_file() and folder.suffix == ".gguf":
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{setting}: {folder} is not a checkpoint folder (no config.json)")
    if is_draft_head(folder):
        of = target_name(read_object(folder / "config.json"))
        raise ConfigError(
            f"{setting}: {folder} is a draft head{f' of {of}' if of else ''}, not a model; give its target"
        )


def is_draft_head(folder: Path) -> bool:
    config = read_object(folder / "config.json")
    names = [*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type")]
    # A multimodal model may have such a name too.
    if any(_NAMED.search(name) for name in names if isinstance(name, str) and not name.endswith("Generation")):
        return True
    return any(_TENSORS.match(name) for name in _tensor_names(folder))


def target_name(head: Mapping[str, Any]) -> str:
    """Returns the target that a head's config names; "": none."""
    verifier = (head.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or head.get("base_model_name_or_path") or "")


def mismatch(head: Mapping[str, Any], target: dict[str, Any]) -> str:
    """Returns why a head cannot be for this target, by the sizes that both configs name; "": it may be."""
    inner, text = head.get("transformer_layer_config") or head, text_config(target)
    hidden = head.get("target_hidden_size") or inner.get("hidden_size") or head.get("emb_dim")
    for name, found in (("hidden_size", hidden), ("vocab_size", inner.get("vocab_size"))):
        wanted = text.get(name)
        if isinstance(found, int) and isinstance(wanted, int) and found != wanted:
            return f"its {name} is {found}, the target's {wanted}"
    return ""


def longest_context(config: dict[str, Any]) -> int | None:
    """Positions that a model's config names; None: it names none."""
    text = text_config(config)
    return next((text[name] for name in _CONTEXT_FIELDS if isinstance(text.get(name), int)), None)


def _tensor_names(folder: Path) -> list[str]:
    """Returns the tensor names of a single safetensors file, as heads have.

    []: other checkpoints, and a file that another check refuses.
    """
    try:
        files = [] if linked_parts(folder) else weight_files(folder)
        if len(files) != 1 or files[0].suffix != ".safetensors":
            return []
        with safe_open(files[0], framework="numpy") as file:
            return list(file.keys())
    except (ConfigError, OSError, SafetensorError):
        return []
