"""The request's fields about tools: their shape, checked and explained. They raise ValueError, as pydantic wants it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

# characters; of a tool's name, as Anthropic has it; OpenAI's limit is 64
_MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{_MAX_NAME_CHARS}}}")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolChoice:
    """The tools that may or must be called. mode: "none", "auto", "required" or "named" (with one name). names: the
    tools allowed; None: all.
    """

    mode: str
    names: tuple[str, ...] | None = None


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list")
    tools = tuple(_tool(entry, f"entry {place}") for place, entry in enumerate(value))
    counts = Counter(tool["function"]["name"] for tool in tools)
    doubled = min((name for name, count in counts.items() if count > 1), default=None)
    if doubled is not None:
        raise ValueError(f"has more than one function of the name {doubled!r}")
    return tools


def _tool(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    kind = value.get("type", "function")
    if kind != "function":
        raise ValueError(f"{where} has type {str(kind)[:40]!r}; only function is supported")
    function = value.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{where} must have a function")
    given = {key: entry for key, entry in function.items() if entry is not None}
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}: function.name must be 1 to {_MAX_NAME_CHARS} letters, digits, underscores or hyphens"
        )
    if not isinstance(given.get("description", ""), str):
        raise ValueError(f"{where}: function.description must be a string")
    if not isinstance(given.get("parameters", {}), dict):
        raise ValueError(f"{where}: function.parameters must be an object")
    if not isinstance(given.get("strict", False), bool):
        raise ValueError(f"{where}: function.strict must be true or false")
    return {"type": "function", "function": given}


def _tool_choice(value: object) -> ToolChoice:
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        return ToolChoice("named", (_function_name(value),))
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
            entries = allowed.get("tools")
            if isinstance(entries, list) and entries:
                return ToolChoice(allowed["mode"], tuple(_function_name(entry) for entry in entries))
        raise ValueError('.allowed_tools must have the mode "auto" or "required" and a list of tools')
    raise ValueError(
        f'must be one of {", ".join(_MODES)}, {{"type": "function", "function": {{"name": ...}}}} or allowed_tools'
    )


def _function_name(value: object) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError("must name a function: function.name")
    return name


_FUNCTION_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
_TOOL_SCHEMA = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION_SCHEMA},
}
ToolList = Annotated[
    tuple[dict[str, Any], ...], PlainValidator(_tools), WithJsonSchema({"type": "array", "items": _TOOL_SCHEMA})
]
ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": list(_MODES)}, {"type": "object"}]}),
]


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool's parameters; a tool without them takes none."""
    parameters: dict[str, Any] = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    return parameters


def is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))
