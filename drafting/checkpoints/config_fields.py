"""Reads third-party JSON objects: every value is checked before use.

Not here: what the keys mean (the loaders).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.drafting.checkpoints.errors import CheckpointRefused

MAX_JSON_BYTES = 256 * 2**20
# largest size that a config may state; far above any model's; products of two sizes stay below 64 bits
MAX_SIZE = 2**24


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads the object in `file`. Raises CheckpointRefused if it is missing, too large, or not a JSON object."""
    try:
        num_bytes = file.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise CheckpointRefused(file, f"it has {num_bytes} bytes, at most {MAX_JSON_BYTES} are read")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also for invalid UTF-8
        raise CheckpointRefused(file, f"it cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointRefused(file, f"it is a JSON {type(found).__name__}, not an object")
    return found


@dataclass(frozen=True)
class ConfigFields:
    """A JSON object with its file's name for messages. An absent key and null are the same."""

    file: Path
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        found = self.get(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.refused(key, found, "a whole number")
        if not minimum <= found <= maximum:
            raise self.refused(key, found, f"a whole number from {minimum} to {maximum}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        found = self.get(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.refused(key, found, "a number")
        if not 0 < found < 1e30 or not math.isfinite(found):
            raise self.refused(key, found, "a number above 0")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.get(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.refused(key, found, "true or false")
        return found

    def text(self, key: str, default: str = "") -> str:
        found = self.get(key)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self.refused(key, found, "a string")
        return found

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """Returns a list of whole numbers, or None if the key is absent."""
        found = self.get(key)
        if found is None:
            return None
        is_list = isinstance(found, list) and len(found) <= 1024
        if not is_list or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in found):
            raise self.refused(key, found, "a list of whole numbers")
        if not all(minimum <= entry <= MAX_SIZE for entry in found):
            raise self.refused(key, found, f"a list of whole numbers from {minimum} to {MAX_SIZE}")
        return tuple(found)

    def mapping(self, key: str) -> ConfigFields | None:
        """Returns a nested object, or None if the key is absent."""
        found = self.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self.refused(key, found, "an object")
        return ConfigFields(self.file, found)

    def architectures(self) -> tuple[str, ...]:
        found = self.get("architectures")
        return tuple(entry for entry in found if isinstance(entry, str)) if isinstance(found, list) else ()

    def require_equal(self, key: str, found: int, wanted: int, owner: str) -> None:
        """Raises CheckpointRefused unless a size of the checkpoint equals the owner's (the target's)."""
        if found != wanted:
            raise CheckpointRefused(self.file, f"{key} is {found}, {owner} has {wanted}")

    def refused(self, key: str, found: object, wanted: str) -> CheckpointRefused:
        shown = "absent" if found is None else json.dumps(found, default=str)[:80]
        return CheckpointRefused(self.file, f"{key} is {shown}, not {wanted}")


def read_config(folder: Path) -> ConfigFields:
    """Reads the folder's config.json. Raises CheckpointRefused."""
    if not folder.is_dir():
        raise CheckpointRefused(folder, "the folder does not exist", "download the checkpoint and name its folder")
    return ConfigFields(folder / "config.json", read_json_object(folder / "config.json"))
