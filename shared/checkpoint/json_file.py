"""One of a checkpoint's JSON files, and the part of a config that is about text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.shared.errors import ConfigError


def read_object(file: Path) -> dict[str, Any]:
    """{}: there is no such file. Raises ConfigError that names it."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is a JSON {type(found).__name__}, not an object")
    return found


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the text model's part of a config.json: the whole of it, unless the model is multimodal."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
