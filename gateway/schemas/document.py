"""The schema as the caller wrote it: where its references lead, its arguments and their types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from outrider.gateway.schemas.keywords import ALL_TYPES, Schema, is_text, types_of

# schemas; nested in one, referenced ones included; each takes about 5 us and 100 characters
MAX_SCHEMAS = 5_000
# objects; alternatives of one schema, each written out; an allOf of anyOfs multiplies them
MAX_OBJECTS = 16
# levels; depth down to which the parts of properties are merged; recursive schemas have no end
MAX_MERGED = 8


class Document:
    """A schema of parameters, whole, to which its references refer."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # A schema with an id of its own is another document to the references within it.
        self._has_ids = '"$id": "' in json.dumps({key: root[key] for key in root if key != "$id"})
        self._types_at: dict[str, frozenset[str]] = {}

    def target(self, pointer: str) -> Any:
        """Returns the schema at a JSON pointer; None if it leads to no schema of this document."""
        if self._has_ids or not (pointer == "#" or pointer.startswith("#/")):
            return None
        found: Any = self._root
        for part in unquote(pointer).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(part)
            elif isinstance(found, list) and part.isascii() and part.isdigit() and len(part) < 6:
                found = found[int(part)] if int(part) < len(found) else None
        return found if isinstance(found, dict | bool) else None

    def _direct(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self.target(schema["$ref"])
        return schema

    def are_disjoint(self, choices: list[Any]) -> bool:
        """Returns whether it is plain that no value fits two choices, by types or by constants of one property."""
        if len(choices) > MAX_OBJECTS:
            return False
        kinds = [self.types([choice]) for choice in choices]
        kinds = [one | {"integer"} if "number" in one else one for one in kinds]
        if all(kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds)):
            return True
        values = [_constants(self._direct(choice)) for choice in choices]
        names = set(values[0]).intersection(*values) if values else set()
        return any(
            sum(len(one[name]) for one in values) == len({v for one in values for v in one[name]}) for name in names
        )

    def arguments(self, schema: Any) -> dict[str, list[Any]]:
        """Maps each property that any part of the schema names to its schemas in those parts."""
        found: dict[str, list[Any]] = {}
        for part in self._all_parts(schema):
            properties = part.get("properties")
            for name, entry in properties.items() if isinstance(properties, dict) else ():
                found.setdefault(name, []).append(entry)
        return found

    def _all_parts(self, schema: Any) -> Iterator[Schema]:
        waiting, seen = [schema], set[str]()
        for _ in range(MAX_SCHEMAS):
            if not waiting:
                return
            part = waiting.pop(0)
            if not isinstance(part, dict):
                continue
            yield part
            pointer = part.get("$ref")
            if isinstance(pointer, str) and pointer not in seen:
                seen.add(pointer)
                waiting.append(self.target(pointer))
            for key in ("allOf", "anyOf", "oneOf"):
                if isinstance(part.get(key), list):
                    waiting += part[key]

    def types(self, schemas: list[Any], depth: int = 0) -> frozenset[str]:
        """Returns the types that any of the schemas names; empty if one names none, or there are too many."""
        found = [self._types_of(schema, depth) for schema in schemas[: MAX_OBJECTS + 1]]
        return frozenset().union(*found) if all(found) and len(found) <= MAX_OBJECTS else frozenset()

    def _types_of(self, schema: Any, depth: int) -> frozenset[str]:
        own = frozenset(types_of(schema)) & ALL_TYPES
        if own or not isinstance(schema, dict) or depth > MAX_MERGED:
            return own
        pointer = schema.get("$ref")
        if isinstance(pointer, str):
            if pointer not in self._types_at:
                self._types_at[pointer] = frozenset()  # within itself
                self._types_at[pointer] = self._types_of(self.target(pointer), depth + 1)
            return self._types_at[pointer]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self.types(schema[key], depth + 1)
        parts = schema.get("allOf")
        if isinstance(parts, list):
            return next(filter(None, (self._types_of(part, depth + 1) for part in parts[:MAX_OBJECTS])), own)
        return own


def _constants(schema: Any) -> dict[str, frozenset[str]]:
    """Maps each required property whose values are listed, and are strings, to those values."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    required = schema.get("required") if isinstance(schema, dict) else None
    found = {}
    for name, entry in properties.items() if isinstance(properties, dict) and isinstance(required, list) else ():
        values = entry.get("enum", [entry["const"]] if "const" in entry else None) if isinstance(entry, dict) else None
        if name in (required or ()) and isinstance(values, list) and all(map(is_text, values)):
            found[name] = frozenset(values)
    return found
