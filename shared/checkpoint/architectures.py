"""Refuses a checkpoint whose architecture is not served by its config.json alone, before a download or a start.

architectures.json is what the engine says of each model type's default config (engine/model/guards.py), written by
tests/engine/architecture_survey.py: this needs neither torch nor transformers. Not here: what depends on a checkpoint's
own sizes and weights, which the engine checks at load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypedDict

from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.errors import ConfigError

TABLE = Path(__file__).with_name("architectures.json")


class Architectures(TypedDict):
    """transformers: its version. served: model types that may be served. refused: model type -> reason."""

    transformers: str
    served: list[str]
    refused: Mapping[str, str]


@cache
def read_architectures() -> Architectures:
    """Returns the table."""
    found: Architectures = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def require_served_architecture(folder: Path) -> None:
    """Raises ConfigError with the reason if the model type of the folder is not served.

    A config.json without a model_type is left to the engine, which knows older forms.
    """
    model_type = read_object(folder / "config.json").get("model_type")
    table = read_architectures()
    if not isinstance(model_type, str) or model_type in table["served"]:
        return
    version = table["transformers"]
    unknown = f"transformers {version} has no causal language model of model type {model_type[:80]!r}"
    reason = table["refused"].get(model_type, unknown)
    raise ConfigError(f"{reason}; docs/architectures.md lists the architectures that are served")
