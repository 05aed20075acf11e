"""One reading of the JSON schema of a tool's parameters, which grammars and the readers of arguments share.

The resulting form refers only to its own definitions, and has only keywords that the grammar engine enforces. Others
are left out: the schema then allows more, and `Reading.beyond` lists them. Objects have no properties but those named,
unless the schema says otherwise: models invent further ones where they may, and OpenAI's strict mode forbids them too.
That rule is applied to an object as a whole, never to one part of an allOf. Work and size are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from outrider.shared.errors import InvalidRequest

Schema = dict[str, Any]

# schemas; nested in one, referenced ones included; each takes about 5 us and 100 characters
_MAX_SCHEMAS = 5_000
# levels; nesting of schemas; the grammar engine reads them recursively too
_MAX_DEPTH = 64
# objects; alternatives of one schema, each written out; an allOf of anyOfs multiplies them
_MAX_OBJECTS = 16
# levels; depth down to which the parts of properties are merged; recursive schemas have no end
_MAX_MERGED = 8
# readings; cached for further requests; agents send the same tools with each
_MAX_KNOWN = 512
# characters; longest schema whose reading is cached
_MAX_KNOWN_CHARS = 32_768

_SCALARS = frozenset(
    (
        *("type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties"),
    )
)
_MAPS, _LISTS = ("properties", "patternProperties"), ("prefixItems", "allOf", "anyOf", "oneOf")
_ONE = ("items", "additionalProperties", "additionalItems")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
# Constraints that the engine lacks.
_BEYOND = frozenset(
    (
        *("not", "if", "uniqueItems", "propertyNames", "contains", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    )
)
_VALUE_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(_MAPS, dict),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), list),
    **dict.fromkeys(("$ref", "pattern", "format"), str),
}
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
# Look-around, references to groups, word boundaries: what no regex of the engine has.
_BEYOND_REGEX = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\(?:[1-9]|k<|[bB])")
_ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


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
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self.definitions[_name_of(schema["$ref"])]
        return schema


def reading_of(parameters: Mapping[str, Any]) -> Reading:
    """Raises InvalidRequest, which names the path in the schema."""
    text = json.dumps(parameters)
    return _known(text) if len(text) <= _MAX_KNOWN_CHARS else _SchemaReader(json.loads(text)).reading()


@lru_cache(maxsize=_MAX_KNOWN)
def _known(text: str) -> Reading:
    return _SchemaReader(json.loads(text)).reading()


def argument_types(parameters: Mapping[str, Any]) -> Mapping[str, Schema]:
    """Maps each argument to a schema of its types only; empty if the parameters' schema cannot be read."""
    try:
        return reading_of(parameters).types
    except InvalidRequest:
        return {}


@dataclass
class _Merged:
    """An object merged from several parts. properties: per name, all the schemas that its value must fit. is_object:
    the schema has `type` or `properties`. names_all: it lists its properties.
    """

    properties: dict[str, list[Any]] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    rest: Schema = field(default_factory=dict)
    is_object: bool = False
    names_all: bool = False

    def and_also(self, other: _Merged) -> _Merged | None:
        """Merges two objects. None if either restricts further properties or their number, which is its own affair."""
        if self.rest or other.rest:
            return None
        names = dict.fromkeys((*self.properties, *other.properties))
        both = {name: [*self.properties.get(name, ()), *other.properties.get(name, ())] for name in names}
        required = list(dict.fromkeys((*self.required, *other.required)))
        is_object, names_all = self.is_object or other.is_object, self.names_all or other.names_all
        return _Merged(both, required, {}, is_object, names_all)


class _SchemaReader:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS
        self._beyond: dict[str, None] = {}
        # A schema with an id of its own is another document to the references within it.
        self._has_ids = '"$id": "' in json.dumps({key: root[key] for key in root if key != "$id"})
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[str, Any, str, bool]] = []
        self._objects_of: dict[str, list[_Merged] | None] = {}
        self._types_at: dict[str, frozenset[str]] = {}

    def reading(self) -> Reading:
        kind = self._root.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise _wrong("", "type must be object")
        root = {**self._root, "type": "object"}
        merged = self._objects(root)
        if merged is None:
            objects, schema = None, self._schema(root, "", 0, is_part=False)
        else:
            schemas = [self._object(one, "", 0) for one in merged]
            objects = tuple(map(_tool_object, schemas))
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        while self._waiting:
            name, target, path, is_part = self._waiting.pop()
            self._definitions[name] = self._schema(target, path, 0, is_part=is_part)
        kinds = {name: self._types(found) for name, found in self._arguments(root).items()}
        types = {name: {"type": sorted(found)} if found else {} for name, found in kinds.items()}
        return Reading(schema, self._definitions, objects, types, tuple(self._beyond))

    # ---- the normal form ----

    def _schema(self, schema: Any, path: str, depth: int, *, is_part: bool) -> Any:
        """Brings a schema into the normal form. is_part: of an object whose other parts stand elsewhere."""
        if isinstance(schema, bool) or schema == {}:
            return schema or schema == {}
        if not isinstance(schema, dict):
            raise _wrong(path, "must be a schema")
        self._num_left -= 1
        if self._num_left < 0:
            raise _wrong("", f"has more than {_MAX_SCHEMAS} schemas")
        if depth > _MAX_DEPTH:
            return self._left_out(path, f"more than {_MAX_DEPTH} levels")
        composed = [name for name in schema if name in _IN_PLACE]
        is_alone = len(composed) == 1 and not any(name in schema for name in (*_SCALARS, *_MAPS, *_ONE))
        if not is_part and depth < _MAX_MERGED and composed and not (is_alone and composed == ["$ref"]):
            merged = self._objects(schema)
            if merged is not None and all(one.is_object for one in merged):
                objects = [self._object(one, path, depth) for one in merged]
                return objects[0] if len(objects) == 1 else {"anyOf": objects}
        parts = is_part or not is_alone or composed == ["allOf"]
        found: Schema = {}
        for key, value in schema.items():
            if _is_of_its_kind(key, value):
                self._entry(found, key, value, f"{path}.{key}", depth, parts=bool(composed) and parts)
            else:
                self._left_out(path, f"{key}, of the wrong type")
        self._fit(found, schema, path)
        if not composed and not is_part and "properties" in found:
            _close(found)
        return found

    def _entry(self, found: Schema, key: str, value: Any, path: str, depth: int, *, parts: bool) -> None:
        if key in _SCALARS:
            found[key] = value
        elif key == "$ref":
            found.update(self._reference(value, path.rpartition(".")[0], is_part=parts))
        elif key in _MAPS:
            found[key] = {
                name: self._schema(entry, f"{path}.{name}", depth + 1, is_part=False) for name, entry in value.items()
            }
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            is_part = parts and key in _IN_PLACE
            entries = [
                self._schema(entry, f"{path}.{place}", depth + 1, is_part=is_part) for place, entry in enumerate(value)
            ]
            if key == "oneOf" and not self._are_disjoint(value):
                self._left_out(path, "several may hold")
            if key == "allOf":
                found.setdefault("allOf", []).extend(entries)
            elif key in _IN_PLACE and "anyOf" in found:
                found.setdefault("allOf", []).append({"anyOf": entries})
            else:
                found["anyOf" if key == "oneOf" else key] = entries
        elif key in _ONE:
            found[key] = self._schema(value, path, depth + 1, is_part=False)
        elif key in _BEYOND and not (key == "uniqueItems" and value is False):
            self._left_out(path.rpartition(".")[0], key)

    def _fit(self, found: Schema, schema: Schema, path: str) -> None:
        """Takes out what the engine refuses."""
        if "format" in found and found["format"] not in _FORMATS:
            self._left_out(path, f"format {found.pop('format')[:40]}")
        if "pattern" in found and _BEYOND_REGEX.search(found["pattern"]):
            self._left_out(path, f"pattern {found.pop('pattern')[:40]}")
        for pattern in [one for one in found.get("patternProperties", ()) if _BEYOND_REGEX.search(one)]:
            self._left_out(path, f"patternProperties {pattern[:40]}")
            # Without the pattern its matches would count as additional properties, so these must be allowed.
            found.pop("patternProperties")
            found["additionalProperties"] = True
            break
        properties = found.get("properties", {})
        is_composed = any(name in schema for name in _IN_PLACE)
        if is_composed or not properties.keys() <= set(filter(_is_text, found.get("required", ()))):
            for key in ("minProperties", "maxProperties"):
                if found.pop(key, 0):
                    self._left_out(path, key)

    def _left_out(self, path: str, what: str) -> Schema:
        """Notes what is left out, and returns the schema that anything fits."""
        self._beyond[f"{path.removeprefix('.')[-120:] or 'the schema'}: {what}"] = None
        return {}

    # ---- references ----

    def _reference(self, pointer: str, path: str, *, is_part: bool) -> Schema:
        target = self._target(pointer)
        if target is None:
            return self._left_out(path, f"$ref {pointer[:80]}")
        name = self._names.get((pointer, is_part))
        if name is None:
            name = self._names[pointer, is_part] = f"d{len(self._names)}"
            self._waiting.append((name, target, pointer.removeprefix("#").replace("/", "."), is_part))
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, pointer: str) -> Any:
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

    # ---- objects of several parts ----

    def _objects(self, schema: Any, depth: int = 0) -> list[_Merged] | None:
        """Returns the alternative objects that the schema allows, each merged from all of its parts; None if it is not
        made of objects alone, or has too many.
        """
        if not isinstance(schema, dict) or depth > _MAX_OBJECTS or _BEYOND & schema.keys():
            return None
        own = _Merged(rest={key: schema[key] for key in schema if key in (*_SCALARS, *_MAPS, *_ONE)})
        own.is_object, own.names_all = "type" in schema or "properties" in schema, "properties" in schema
        properties, required = own.rest.pop("properties", {}), own.rest.pop("required", [])
        if own.rest.pop("type", "object") != "object" or not isinstance(properties, dict):
            return None
        if not isinstance(required, list) or not all(map(_is_text, required)):
            return None
        own.properties, own.required = {name: [entry] for name, entry in properties.items()}, required
        found: list[_Merged] = [own]
        for part in self._parts(schema, depth + 1):
            if part is None or len(found) * len(part) > _MAX_OBJECTS:
                return None
            both = [one.and_also(other) for one in found for other in part]
            found = [one for one in both if one is not None]
            if len(found) < len(both):
                return None
        return found

    def _parts(self, schema: Schema, depth: int) -> Iterator[list[_Merged] | None]:
        """Yields, for each condition besides the schema's own keywords, the objects that it allows; None if unknown."""
        for key in _IN_PLACE:
            value = schema.get(key)
            if key == "$ref" and isinstance(value, str):
                if value not in self._objects_of:
                    self._objects_of[value] = None  # within itself
                    self._objects_of[value] = self._objects(self._target(value), depth)
                yield self._objects_of[value]
            elif key in schema and not isinstance(value, list):
                yield None
            elif key == "allOf" and value:
                yield from (self._objects(entry, depth) for entry in value)
            elif value:
                choices = [self._objects(entry, depth) for entry in value[: _MAX_OBJECTS + 1]]
                whole = [one for choice in choices for one in choice or ()]
                is_plain = None not in choices and (key == "anyOf" or self._are_disjoint(value))
                yield whole if is_plain else None

    def _object(self, merged: _Merged, path: str, depth: int) -> Schema:
        properties = {
            name: self._schema(
                entries[0] if len(entries) == 1 else {"allOf": entries}, f"{path}.{name}", depth + 1, is_part=False
            )
            for name, entries in merged.properties.items()
        }
        found = self._schema(merged.rest, path, depth, is_part=True) if merged.rest else {}
        found |= {"type": "object", "properties": properties, "required": merged.required}
        if merged.names_all:
            _close(found)
        self._fit(found, {}, path)
        return found

    # ---- types ----

    def _are_disjoint(self, choices: list[Any]) -> bool:
        """Returns whether it is plain that no value fits two choices, by types or by constants of one property."""
        if len(choices) > _MAX_OBJECTS:
            return False
        kinds = [self._types([choice]) for choice in choices]
        kinds = [one | {"integer"} if "number" in one else one for one in kinds]
        if all(kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds)):
            return True
        values = [_constants(self._direct(choice)) for choice in choices]
        names = set(values[0]).intersection(*values) if values else set()
        return any(
            sum(len(one[name]) for one in values) == len({v for one in values for v in one[name]}) for name in names
        )

    def _direct(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema

    def _arguments(self, schema: Any) -> dict[str, list[Any]]:
        """Maps each property that any part of the schema names to its schemas in those parts."""
        found: dict[str, list[Any]] = {}
        for part in self._all_parts(schema):
            properties = part.get("properties")
            for name, entry in properties.items() if isinstance(properties, dict) else ():
                found.setdefault(name, []).append(entry)
        return found

    def _all_parts(self, schema: Any) -> Iterator[Schema]:
        waiting, seen = [schema], set[str]()
        for _ in range(_MAX_SCHEMAS):
            if not waiting:
                return
            part = waiting.pop(0)
            if not isinstance(part, dict):
                continue
            yield part
            pointer = part.get("$ref")
            if isinstance(pointer, str) and pointer not in seen:
                seen.add(pointer)
                waiting.append(self._target(pointer))
            for key in ("allOf", "anyOf", "oneOf"):
                if isinstance(part.get(key), list):
                    waiting += part[key]

    def _types(self, schemas: list[Any], depth: int = 0) -> frozenset[str]:
        """Returns the types that any of the schemas names; empty if one names none, or there are too many."""
        found = [self._types_of(schema, depth) for schema in schemas[: _MAX_OBJECTS + 1]]
        return frozenset().union(*found) if all(found) and len(found) <= _MAX_OBJECTS else frozenset()

    def _types_of(self, schema: Any, depth: int) -> frozenset[str]:
        own = frozenset(types_of(schema)) & _ALL_TYPES
        if own or not isinstance(schema, dict) or depth > _MAX_MERGED:
            return own
        pointer = schema.get("$ref")
        if isinstance(pointer, str):
            if pointer not in self._types_at:
                self._types_at[pointer] = frozenset()  # within itself
                self._types_at[pointer] = self._types_of(self._target(pointer), depth + 1)
            return self._types_at[pointer]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._types(schema[key], depth + 1)
        parts = schema.get("allOf")
        if isinstance(parts, list):
            return next(filter(None, (self._types_of(part, depth + 1) for part in parts[:_MAX_OBJECTS])), own)
        return own


def _is_of_its_kind(key: str, value: Any) -> bool:
    if key == "required":
        return isinstance(value, list) and all(map(_is_text, value))
    return isinstance(value, _VALUE_KINDS.get(key, object))


def _wrong(path: str, what: str) -> InvalidRequest:
    where = f"parameters{path}"
    return InvalidRequest(f"{where[:200]} {what}", param="tools")


def _close(found: Schema) -> None:
    """Allows only properties that are named or required, unless the schema itself says otherwise."""
    if "additionalProperties" not in found:
        names = filter(_is_text, found.get("required", ()))
        found["properties"] = {**found["properties"], **{name: {} for name in names if name not in found["properties"]}}
        found["additionalProperties"] = False


def _tool_object(schema: Schema) -> ToolObject:
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return ToolObject(
        schema.get("properties", {}), frozenset(schema.get("required", ())), None if others is False else others
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _constants(schema: Any) -> dict[str, frozenset[str]]:
    """Maps each required property whose values are listed, and are strings, to those values."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    required = schema.get("required") if isinstance(schema, dict) else None
    found = {}
    for name, entry in properties.items() if isinstance(properties, dict) and isinstance(required, list) else ():
        values = entry.get("enum", [entry["const"]] if "const" in entry else None) if isinstance(entry, dict) else None
        if name in (required or ()) and isinstance(values, list) and all(map(_is_text, values)):
            found[name] = frozenset(values)
    return found


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
            elif key in _MAPS:
                waiting += value.values()
            elif isinstance(value, list) and key not in _SCALARS:
                waiting += value
            elif key in _ONE:
                waiting.append(value)


# ---- types ----


def kind_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def types_of(schema: Any) -> set[str]:
    """Returns the JSON types that a schema itself names; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(schema.get("enum"), list):
        return {kind for value in schema["enum"] for kind in kind_of(value)}
    if "const" in schema:
        return kind_of(schema["const"])
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()


def is_only_string(schema: Any) -> bool:
    return types_of(schema) == {"string"}
