"""Objects of several parts: what allOf, anyOf, oneOf and references make together, as a list of whole objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.schemas.document import MAX_OBJECTS, Document
from outrider.gateway.schemas.keywords import BEYOND, IN_PLACE, MAPS, ONE, SCALARS, Schema, is_text


@dataclass
class Merged:
    """An object merged from several parts. properties: per name, all the schemas that its value must fit. is_object:
    the schema has `type` or `properties`. names_all: it lists its properties.
    """

    properties: dict[str, list[Any]] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    rest: Schema = field(default_factory=dict)
    is_object: bool = False
    names_all: bool = False

    def and_also(self, other: Merged) -> Merged | None:
        """Merges two objects. None if either restricts further properties or their number, which is its own affair."""
        if self.rest or other.rest:
            return None
        names = dict.fromkeys((*self.properties, *other.properties))
        both = {name: [*self.properties.get(name, ()), *other.properties.get(name, ())] for name in names}
        required = list(dict.fromkeys((*self.required, *other.required)))
        is_object, names_all = self.is_object or other.is_object, self.names_all or other.names_all
        return Merged(both, required, {}, is_object, names_all)


class Objects:
    """The alternative objects that a document's schemas allow. Each reference is followed once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._at: dict[str, list[Merged] | None] = {}

    def of(self, schema: Any, depth: int = 0) -> list[Merged] | None:
        """Returns the alternative objects that the schema allows, each merged from all of its parts; None if it is not
        made of objects alone, or has too many.
        """
        if not isinstance(schema, dict) or depth > MAX_OBJECTS or BEYOND & schema.keys():
            return None
        own = Merged(rest={key: schema[key] for key in schema if key in (*SCALARS, *MAPS, *ONE)})
        own.is_object, own.names_all = "type" in schema or "properties" in schema, "properties" in schema
        properties, required = own.rest.pop("properties", {}), own.rest.pop("required", [])
        if own.rest.pop("type", "object") != "object" or not isinstance(properties, dict):
            return None
        if not isinstance(required, list) or not all(map(is_text, required)):
            return None
        own.properties, own.required = {name: [entry] for name, entry in properties.items()}, required
        found: list[Merged] = [own]
        for part in self._parts(schema, depth + 1):
            if part is None or len(found) * len(part) > MAX_OBJECTS:
                return None
            both = [one.and_also(other) for one in found for other in part]
            found = [one for one in both if one is not None]
            if len(found) < len(both):
                return None
        return found

    def _parts(self, schema: Schema, depth: int) -> Iterator[list[Merged] | None]:
        """Yields, for each condition besides the schema's own keywords, the objects that it allows; None if unknown."""
        for key in IN_PLACE:
            value = schema.get(key)
            if key == "$ref" and isinstance(value, str):
                if value not in self._at:
                    self._at[value] = None  # within itself
                    self._at[value] = self.of(self._document.target(value), depth)
                yield self._at[value]
            elif key in schema and not isinstance(value, list):
                yield None
            elif key == "allOf" and value:
                yield from (self.of(entry, depth) for entry in value)
            elif value:
                choices = [self.of(entry, depth) for entry in value[: MAX_OBJECTS + 1]]
                whole = [one for choice in choices for one in choice or ()]
                is_plain = None not in choices and (key == "anyOf" or self._document.are_disjoint(value))
                yield whole if is_plain else None
