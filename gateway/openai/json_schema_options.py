"""vLLM's options of JSON grammars, written into the schema: its whitespace, and no properties but the named ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.shared.errors import InvalidRequest

# llguidance reads its options from this key of the schema.
_OPTIONS_KEY = "x-guidance"
_NAMING = ("properties", "patternProperties")
# JSON Schema's applicators (2020-12, sections 10 and 11, and those of older drafts): of one schema, of named schemas,
# of a list. "items" is of the first kind or of the last.
_WITH_SCHEMA = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "contains", "additionalItems"),
    *("unevaluatedItems", "not", "if", "then", "else"),
)
_WITH_NAMED = (*_NAMING, "$defs", "definitions", "dependentSchemas")
_WITH_LIST = ("items", "prefixItems", "allOf", "anyOf", "oneOf")


def with_whitespace(schema: dict[str, Any], disable_any_whitespace: bool, pattern: str | None) -> dict[str, Any]:
    """Returns the schema with these options; raises InvalidRequest when both are given."""
    if disable_any_whitespace and pattern is not None:
        raise InvalidRequest(
            "give structured_outputs.disable_any_whitespace or whitespace_pattern, not both",
            param="structured_outputs.whitespace_pattern",
        )
    options: Mapping[str, Any] = {}
    if disable_any_whitespace:
        options = {"whitespace_flexible": False}
    elif pattern is not None:
        options = {"whitespace_pattern": pattern}
    if not options:
        return schema
    given = schema.get(_OPTIONS_KEY)
    return {**schema, _OPTIONS_KEY: {**(given if isinstance(given, dict) else {}), **options}}


def without_additional_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy in which every object schema that names properties has no others, unless it says what others."""
    closed: dict[str, Any] = json.loads(json.dumps(schema))  # copy.deepcopy recurses in Python
    to_visit = [closed]
    while to_visit:
        node = to_visit.pop()
        to_visit += _subschemas(node)
        if any(isinstance(node.get(name), dict) for name in _NAMING):
            node.setdefault("additionalProperties", False)
    return closed


def _subschemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[Any] = [schema.get(name) for name in _WITH_SCHEMA]
    for name in _WITH_NAMED:
        if isinstance(named := schema.get(name), dict):
            found += named.values()
    for name in _WITH_LIST:
        if isinstance(listed := schema.get(name), list):
            found += listed
    return [value for value in found if isinstance(value, dict)]
