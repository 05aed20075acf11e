"""Finds the files of a checkpoint folder that hold its weights and its tokenizer, by transformers' names for them.

Not here: reading them (engine/model).
"""

from __future__ import annotations

import json
from pathlib import Path, PurePath

from outrider.shared.errors import ConfigError

# The first kind that a folder has is read. The file of an undivided checkpoint, and the files of any other.
_KINDS = (
    ("model.safetensors", "*.safetensors"),
    ("pytorch_model.bin", "pytorch_model*.bin"),
    ("medusa_lm_head.pt", "medusa_lm_head.pt"),  # the original Medusa's
)
# File in a folder made for a GGUF file; names the links to its parts.
GGUF_PARTS = "gguf_parts.json"
# The config of a checkpoint in Mistral's own layout, whose weights are consolidated*.safetensors.
PARAMS_FILE = "params.json"
_OLDER_TOKENIZERS = (("vocab.json", "merges.txt"), ("tokenizer.model",))


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files in the order of their names, at least one.

    Raises ConfigError: there is none, or one that the index names is missing.
    """
    for single, pattern in _KINDS:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            return _indexed_files(index, PurePath(single).suffix)
        if found := sorted(folder.glob(pattern)):
            return found
    advice = "; give the name of one .gguf file in it" if any(folder.glob("*.gguf")) else ""
    raise ConfigError(f"it has neither *.safetensors nor pytorch_model*.bin{advice}")


def native_weights(folder: Path) -> list[Path]:
    """The weight files of a folder in Mistral's own layout; []: it has a config.json, or is no such folder."""
    if (folder / "config.json").is_file() or not (folder / PARAMS_FILE).is_file():
        return []
    return sorted(folder.glob("consolidated*.safetensors"))


def linked_parts(folder: Path) -> list[Path]:
    """The parts of the GGUF file that a folder stands for; []: it is no such folder, whatever *.gguf lie in it."""
    names = folder / GGUF_PARTS
    return [folder / name for name in json.loads(names.read_text())] if names.is_file() else []


def older_tokenizer(folder: Path) -> tuple[str, ...]:
    """The files of a tokenizer that must be converted to tokenizer.json; (): it is there, or there is no tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return ()
    forms = (names for names in _OLDER_TOKENIZERS if all((folder / name).is_file() for name in names))
    return next(forms, ())


def _indexed_files(index: Path, ending: str) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index.name} cannot be read: {error!r}; download it again") from error
    for name in names:
        if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(ending):
            raise ConfigError(f"{index.name} names {name!r}, not a *{ending} file in the folder")
        if not (index.parent / name).is_file():
            raise ConfigError(f"{index.name} names {name}, which is not there; download it again")
    if not names:
        raise ConfigError(f"{index.name} names no file; download it again")
    return [index.parent / name for name in sorted(names)]
