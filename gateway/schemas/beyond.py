"""Leaves out what the grammar engine lacks, which makes the schema allow more, and is noted with its path."""

from __future__ import annotations

import re

from outrider.gateway.schemas.keywords import IN_PLACE, Schema, is_text
from outrider.shared.errors import InvalidRequest

_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
# Look-around, references to groups, word boundaries: what no regex of the engine has.
_BEYOND_REGEX = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\(?:[1-9]|k<|[bB])")


class Beyond:
    """The constraints of one schema that are left out."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def said(self) -> tuple[str, ...]:
        return tuple(self._found)

    def note(self, path: str, what: str) -> Schema:
        """Notes what is left out, and returns the schema that anything fits."""
        self._found[f"{path.removeprefix('.')[-120:] or 'the schema'}: {what}"] = None
        return {}

    def fit(self, found: Schema, schema: Schema, path: str) -> None:
        """Takes out what the engine refuses."""
        if "format" in found and found["format"] not in _FORMATS:
            self.note(path, f"format {found.pop('format')[:40]}")
        if "pattern" in found and _BEYOND_REGEX.search(found["pattern"]):
            self.note(path, f"pattern {found.pop('pattern')[:40]}")
        for pattern in [one for one in found.get("patternProperties", ()) if _BEYOND_REGEX.search(one)]:
            self.note(path, f"patternProperties {pattern[:40]}")
            # Without the pattern its matches would count as additional properties, so these must be allowed.
            found.pop("patternProperties")
            found["additionalProperties"] = True
            break
        properties = found.get("properties", {})
        is_composed = any(name in schema for name in IN_PLACE)
        if is_composed or not properties.keys() <= set(filter(is_text, found.get("required", ()))):
            for key in ("minProperties", "maxProperties"):
                if found.pop(key, 0):
                    self.note(path, key)


def wrong(path: str, what: str) -> InvalidRequest:
    where = f"parameters{path}"
    return InvalidRequest(f"{where[:200]} {what}", param="tools")
