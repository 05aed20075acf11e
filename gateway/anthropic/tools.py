"""Anthropic's tools and tool_choice as a chat's. The functions raise ValueError, as pydantic wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from outrider.gateway.openai.fields import boolean, json_kind, string
from outrider.gateway.tool_calls.fields import ToolChoice

# Fields of a tool that mean something and are not served, with the values that have no effect.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"], []),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_MODES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


@dataclass(frozen=True)
class Choice:
    """parallel: whether more than one tool may be called in a turn."""

    tool_choice: ToolChoice
    parallel: bool = True


def _functions(value: object) -> tuple[dict[str, Any], ...]:
    """Converts tools to the form that /v1/chat/completions takes, which checks their names and schemas."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {json_kind(value)}")
    return tuple(_function(tool, f"entry {place}") for place, tool in enumerate(value))


def _function(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(tool)}")
    given = {name: value for name, value in tool.items() if value is not None}
    kind = given.get("type", "custom")
    if kind != "custom":
        raise ValueError(f"{where} has type {str(kind)[:40]!r}; only custom tools, with an input_schema, are supported")
    for name in _UNSUPPORTED.keys() & given.keys():
        if given[name] not in _UNSUPPORTED[name]:
            raise ValueError(f"{where}: {name} is not supported")
    if not isinstance(given.get("input_schema"), dict):
        raise ValueError(f"{where} must have an object as input_schema, got {json_kind(given.get('input_schema'))}")
    function = {name: given[name] for name in ("name", "description", "strict") if name in given}
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}


def _choice(value: object) -> Choice:
    given = value if isinstance(value, dict) else {}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _MODES:
        raise ValueError(f"must be an object whose type is one of {', '.join(_MODES)}")
    disabled = given.get("disable_parallel_tool_use")
    try:
        parallel = disabled is None or not boolean(disabled)
    except ValueError as error:
        raise ValueError(f".disable_parallel_tool_use {error}") from None
    if kind != "tool":
        return Choice(ToolChoice(_MODES[kind]), parallel)
    try:
        return Choice(ToolChoice("named", (string(given.get("name")),)), parallel)
    except ValueError as error:
        raise ValueError(f".name {error}") from None


_TOOL_SCHEMA = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "type": {"type": "string", "enum": ["custom"]},
        "name": {"type": "string"},
        "description": {"type": "string"},
        "input_schema": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
_CHOICE_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": list(_MODES)},
        "name": {"type": "string"},
        "disable_parallel_tool_use": {"type": "boolean"},
    },
}
Functions = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(_functions),
    WithJsonSchema({"type": "array", "items": _TOOL_SCHEMA}),
]
ChoiceField = Annotated[Choice, PlainValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)]
