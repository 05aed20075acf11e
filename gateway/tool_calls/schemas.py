"""The JSON schemas of tools' parameters: as grammars need them, and what the types of arguments make of plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Keys that say nothing about what is valid.
_NOTES = frozenset({"description", "title", "default", "examples", "$schema", "$id", "deprecated"})
# Keys whose value maps names to schemas, is one schema, or a list of schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ONE = frozenset({"items", "additionalProperties", "not", "contains"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# count; $refs that are followed to a type, one after the other
_MAX_REFS = 8

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def closed(schema: Any) -> Any:
    """Without notes, and objects have no properties but those named, unless the schema says otherwise. Models make up
    further properties where they may; OpenAI's strict mode does not let them either.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {key: _closed_entry(key, value) for key, value in schema.items() if key not in _NOTES}
    if isinstance(kept.get("properties"), dict):
        kept.setdefault("additionalProperties", False)
    return kept


def _closed_entry(key: str, value: Any) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: closed(entry) for name, entry in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [closed(entry) for entry in value]
    return closed(value) if key in _ONE else value


def lifted(schema: Mapping[str, Any], wrap: Mapping[str, Any]) -> dict[str, Any]:
    """`wrap`, a schema that holds `schema`, with the definitions that its references point to at the top."""
    return {**wrap, **{key: schema[key] for key in ("$defs", "definitions") if key in schema}}


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Per argument its schema, references resolved as far as its type."""
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _resolved(entry, parameters) for name, entry in properties.items()}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REFS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        schema = target
    if isinstance(schema, dict) and isinstance(schema.get("anyOf"), list):
        return {**schema, "anyOf": [_resolved(entry, {**root, "anyOf": []}) for entry in schema["anyOf"]]}
    return schema


# ---- arguments that are written as plain text ----


def as_json(text: str, schema: Any) -> str:
    """A value's text as JSON: as it is if it is JSON that the schema allows, else as a string."""
    text = _PYTHON_WORDS.get(text, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str):
        return text
    types = types_of(schema)
    if types and kind_of(value).isdisjoint(types) and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return text


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
    """The JSON types that a schema names; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(schema.get("enum"), list):
        return {kind for value in schema["enum"] for kind in kind_of(value)}
    if "const" in schema:
        return kind_of(schema["const"])
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    branches = schema.get("anyOf") or schema.get("oneOf") or []
    found = [types_of(branch) for branch in branches] if isinstance(branches, list) else []
    return set().union(*found) if found and all(found) else set()


def is_only_string(schema: Any) -> bool:
    return types_of(schema) == {"string"}
