"""Finds the tokens that end a text: those that any of a checkpoint's files names as its end.

generation_config.json often lacks what config.json or the tokenizer names, and the other way round: a chat model's
turns end with the tokenizer's eos_token, while config.json has the base model's. Not here: stop tokens of a request
(engine/sampling/permitted.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from outrider.engine.errors import ModelRefused
from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.errors import ConfigError


def read_eos_token_ids(path: str, config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids that the checkpoint names.

    They are those of generation_config.json, config.json and the tokenizer, in this order and each once. config:
    transformers' config of the checkpoint, whose class has a default where no file names one. Ids outside the
    vocabulary are ignored. Raises ModelRefused that names the file.
    """
    folder, text_config = Path(path), config.get_text_config()
    try:
        named = [*_ids(folder / "generation_config.json"), *_ids(folder / "config.json"), *_ids_of_tokenizer(folder)]
    except ConfigError as error:
        raise ModelRefused(path, error.message) from error
    named = named or _as_list(getattr(text_config, "eos_token_id", None))
    return tuple(dict.fromkeys(token_id for token_id in named if 0 <= token_id < int(text_config.vocab_size)))


def _ids(file: Path) -> list[int]:
    found = read_object(file)
    text_config = found.get("text_config")
    sources: list[Mapping[str, Any]] = [found, text_config if isinstance(text_config, dict) else {}]
    ids = [token_id for source in sources for token_id in _as_list(source.get("eos_token_id"))]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, got {ids!r}")
    return ids


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _ids_of_tokenizer(folder: Path) -> list[int]:
    entry = read_object(folder / "tokenizer_config.json").get("eos_token")
    text = entry.get("content") if isinstance(entry, dict) else entry
    file = folder / "tokenizer.json"
    if not isinstance(text, str) or not file.is_file():
        return []
    try:
        token_id = tokenizers.Tokenizer.from_file(str(file)).token_to_id(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return [] if token_id is None else [token_id]
