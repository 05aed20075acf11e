"""The normal form of a schema: only keywords that the grammar engine enforces, and references to its own definitions.

Objects have no properties but those named, unless the schema says otherwise: models invent further ones where they may,
and OpenAI's strict mode forbids them too. That rule is applied to an object as a whole, never to one part of an allOf.
Work and size are bounded.
"""

from __future__ import annotations

from typing import Any

from outrider.gateway.schemas.beyond import Beyond, wrong
from outrider.gateway.schemas.document import MAX_MERGED, MAX_SCHEMAS, Document
from outrider.gateway.schemas.keywords import (
    BEYOND,
    IN_PLACE,
    LISTS,
    MAPS,
    ONE,
    SCALARS,
    Schema,
    is_of_its_kind,
    is_text,
)
from outrider.gateway.schemas.objects import Merged, Objects

# levels; nesting of schemas; the grammar engine reads them recursively too
MAX_DEPTH = 64


class NormalForm:
    """Brings the schemas of one document into the normal form. `objects` and `beyond` are the document's."""

    def __init__(self, document: Document, objects: Objects, beyond: Beyond) -> None:
        self._document = document
        self._objects = objects
        self._beyond = beyond
        self._num_left = MAX_SCHEMAS
        self._names: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[str, Any, str, bool]] = []

    def definitions(self) -> dict[str, Any]:
        """Returns what the schemas so far refer to, by name; each is brought into the form once."""
        found: dict[str, Any] = {}
        while self._waiting:
            name, target, path, is_part = self._waiting.pop()
            found[name] = self.schema(target, path, 0, is_part=is_part)
        return found

    def schema(self, schema: Any, path: str, depth: int, *, is_part: bool) -> Any:
        """Brings a schema into the normal form. is_part: of an object whose other parts stand elsewhere."""
        if isinstance(schema, bool) or schema == {}:
            return schema or schema == {}
        if not isinstance(schema, dict):
            raise wrong(path, "must be a schema")
        self._num_left -= 1
        if self._num_left < 0:
            raise wrong("", f"has more than {MAX_SCHEMAS} schemas")
        if depth > MAX_DEPTH:
            return self._beyond.note(path, f"more than {MAX_DEPTH} levels")
        composed = [name for name in schema if name in IN_PLACE]
        is_alone = len(composed) == 1 and not any(name in schema for name in (*SCALARS, *MAPS, *ONE))
        if not is_part and depth < MAX_MERGED and composed and not (is_alone and composed == ["$ref"]):
            merged = self._objects.of(schema)
            if merged is not None and all(one.is_object for one in merged):
                objects = [self.object(one, path, depth) for one in merged]
                return objects[0] if len(objects) == 1 else {"anyOf": objects}
        parts = is_part or not is_alone or composed == ["allOf"]
        found: Schema = {}
        for key, value in schema.items():
            if is_of_its_kind(key, value):
                self._entry(found, key, value, f"{path}.{key}", depth, parts=bool(composed) and parts)
            else:
                self._beyond.note(path, f"{key}, of the wrong type")
        self._beyond.fit(found, schema, path)
        if not composed and not is_part and "properties" in found:
            _close(found)
        return found

    def object(self, merged: Merged, path: str, depth: int) -> Schema:
        properties = {
            name: self.schema(
                entries[0] if len(entries) == 1 else {"allOf": entries}, f"{path}.{name}", depth + 1, is_part=False
            )
            for name, entries in merged.properties.items()
        }
        found = self.schema(merged.rest, path, depth, is_part=True) if merged.rest else {}
        found |= {"type": "object", "properties": properties, "required": merged.required}
        if merged.names_all:
            _close(found)
        self._beyond.fit(found, {}, path)
        return found

    def _entry(self, found: Schema, key: str, value: Any, path: str, depth: int, *, parts: bool) -> None:
        if key in SCALARS:
            found[key] = value
        elif key == "$ref":
            found.update(self._reference(value, path.rpartition(".")[0], is_part=parts))
        elif key in MAPS:
            found[key] = {
                name: self.schema(entry, f"{path}.{name}", depth + 1, is_part=False) for name, entry in value.items()
            }
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            is_part = parts and key in IN_PLACE
            entries = [
                self.schema(entry, f"{path}.{place}", depth + 1, is_part=is_part) for place, entry in enumerate(value)
            ]
            if key == "oneOf" and not self._document.are_disjoint(value):
                self._beyond.note(path, "several may hold")
            if key == "allOf":
                found.setdefault("allOf", []).extend(entries)
            elif key in IN_PLACE and "anyOf" in found:
                found.setdefault("allOf", []).append({"anyOf": entries})
            else:
                found["anyOf" if key == "oneOf" else key] = entries
        elif key in ONE:
            found[key] = self.schema(value, path, depth + 1, is_part=False)
        elif key in BEYOND and not (key == "uniqueItems" and value is False):
            self._beyond.note(path.rpartition(".")[0], key)

    def _reference(self, pointer: str, path: str, *, is_part: bool) -> Schema:
        target = self._document.target(pointer)
        if target is None:
            return self._beyond.note(path, f"$ref {pointer[:80]}")
        name = self._names.get((pointer, is_part))
        if name is None:
            name = self._names[pointer, is_part] = f"d{len(self._names)}"
            self._waiting.append((name, target, pointer.removeprefix("#").replace("/", "."), is_part))
        return {"$ref": f"#/$defs/{name}"}


def _close(found: Schema) -> None:
    """Allows only properties that are named or required, unless the schema itself says otherwise."""
    if "additionalProperties" not in found:
        names = filter(is_text, found.get("required", ()))
        found["properties"] = {**found["properties"], **{name: {} for name in names if name not in found["properties"]}}
        found["additionalProperties"] = False
