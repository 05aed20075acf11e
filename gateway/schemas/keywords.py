"""The keywords of a JSON schema, by what they hold, and the types that a schema itself names."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

SCALARS = frozenset(
    (
        *("type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties"),
    )
)
MAPS, LISTS = ("properties", "patternProperties"), ("prefixItems", "allOf", "anyOf", "oneOf")
ONE = ("items", "additionalProperties", "additionalItems")
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
# Constraints that the engine lacks.
BEYOND = frozenset(
    (
        *("not", "if", "uniqueItems", "propertyNames", "contains", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    )
)
ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_VALUE_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(MAPS, dict),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), list),
    **dict.fromkeys(("$ref", "pattern", "format"), str),
}


def is_of_its_kind(key: str, value: Any) -> bool:
    if key == "required":
        return isinstance(value, list) and all(map(is_text, value))
    return isinstance(value, _VALUE_KINDS.get(key, object))


def is_text(value: object) -> bool:
    return isinstance(value, str)


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
