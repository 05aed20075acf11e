"""One reading of the JSON schema of a tool's parameters, which grammars and the readers of arguments share.

The resulting form refers only to its own definitions, and has only keywords that the grammar engine enforces. Others
are left out: the schema then allows more, and `Reading.beyond` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outrider.gateway.schemas.beyond import Beyond, wrong
from outrider.gateway.schemas.document import Document
from outrider.gateway.schemas.keywords import MAPS, ONE, SCALARS, Schema
from outrider.gateway.schemas.normal_form import MAX_DEPTH, NormalForm
from outrider.gateway.schemas.objects import Objects
from outrider.shared.errors import InvalidRequest

# readings; cached for further requests; agents send the same tools with each
_MAX_KNOWN = 512
# characters; longest schema whose reading is cached
_MAX_KNOWN_CHARS = 32_768


@dataclass(frozen=True)
class ToolObject:
    """One object that arguments may be. others: the schema of further ones; None: there are none."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    others: Any = None


@dataclass(frozen=True)
class Reading:
    """A schema that was read. schema: of the arguments, an object, without its definitions. objects: the same for a
    grammar that writes each argument apart; None: it has no such form. types: per argument, a schema of its types
    alone. beyond: constraints that are left out, with their paths.
    """

    schema: Schema
    definitions: Mapping[str, Any]
    objects: tuple[ToolObject, ...] | None
    types: Mapping[str, Schema]
    beyond: tuple[str, ...]

    def with_definitions(self, schema: Any) -> Schema:
        """Returns a schema of this reading, complete with the definitions that it needs."""
        needed: dict[str, Any] = {}
        waiting = list(_references(schema))
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed[name] = self.definitions[name]
                waiting += _references(needed[name])
        whole = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        return {**whole, "$defs": needed} if needed else whole

    def resolved(self, schema: Any) -> Any:
        """Returns the schema that a chain of references leads to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self.definitions[_name_of(schema["$ref"])]
        return schema


def reading_of(parameters: Mapping[str, Any]) -> Reading:
    """Raises InvalidRequest, which names the path in the schema."""
    text = json.dumps(parameters)
    return _known(text) if len(text) <= _MAX_KNOWN_CHARS else _read(text)


@lru_cache(maxsize=_MAX_KNOWN)
def _known(text: str) -> Reading:
    return _read(text)


def argument_types(parameters: Mapping[str, Any]) -> Mapping[str, Schema]:
    """Maps each argument to a schema of its types only; empty if the parameters' schema cannot be read."""
    try:
        return reading_of(parameters).types
    except InvalidRequest:
        return {}


def _read(text: str) -> Reading:
    given = json.loads(text)
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise wrong("", "type must be object")
    root = {**given, "type": "object"}
    document, beyond = Document(given), Beyond()
    all_objects = Objects(document)
    form = NormalForm(document, all_objects, beyond)
    merged = all_objects.of(root)
    if merged is None:
        objects, schema = None, form.schema(root, "", 0, is_part=False)
    else:
        schemas = [form.object(one, "", 0) for one in merged]
        objects = tuple(map(_tool_object, schemas))
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    definitions = form.definitions()
    kinds = {name: document.types(found) for name, found in document.arguments(root).items()}
    types = {name: {"type": sorted(found)} if found else {} for name, found in kinds.items()}
    return Reading(schema, definitions, objects, types, beyond.said())


def _tool_object(schema: Schema) -> ToolObject:
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return ToolObject(
        schema.get("properties", {}), frozenset(schema.get("required", ())), None if others is False else others
    )


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


def _references(schema: Any) -> Iterator[str]:
    """Yields the names of definitions that a schema in the normal form refers to."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        for key, value in node.items() if isinstance(node, dict) else ():
            if key == "$ref":
                yield _name_of(value)
            elif key in MAPS:
                waiting += value.values()
            elif isinstance(value, list) and key not in SCALARS:
                waiting += value
            elif key in ONE:
                waiting.append(value)
