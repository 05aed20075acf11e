"""The tools of a response as a chat's, which has functions alone. What is wrong in either form stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.openai.fields import json_kind
from outrider.shared.errors import InvalidRequest

# Built into OpenAI's servers and models; agents send them unasked. As vLLM, they are not shown to the model.
_BUILT_IN = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "tool_search"),
    *("local_shell", "shell", "apply_patch"),
)
# Between the names of a namespace and of a function in it; vLLM's.
_SEPARATOR = "__"


def chat_tools(value: object) -> list[object]:
    """Raises InvalidRequest."""
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"tools must be a list, got {json_kind(value)}", param="tools")
    return [_nested(function) for tool in served_tools(value) for function in _functions(tool)]


def served_tools(tools: Sequence[object]) -> list[object]:
    """Without those that are built in: of each kind also what is newer, `web_search_preview` or with a date."""
    return [tool for tool in tools if not _kind(tool).startswith(_BUILT_IN)]


def chat_choice(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        nested = [_nested(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": nested}}
    return _nested(value)


def flat_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def namespaces(tools: Sequence[object]) -> dict[str, dict[str, str]]:
    """Per flat name of a function in a namespace, what a call of it says of both."""
    return {
        flat_name(function["name"], tool["name"]): {"namespace": tool["name"], "name": function["name"]}
        for tool in tools
        if isinstance(tool, dict) and tool.get("type") == "namespace"
        for function in tool["tools"]
    }


def _kind(tool: object) -> str:
    return str(tool.get("type", "")) if isinstance(tool, dict) else ""


def _functions(tool: object) -> list[object]:
    """Of a namespace, under their flat names. Raises InvalidRequest."""
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return [tool]
    name, functions = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(functions, list):
        raise InvalidRequest("tools: a namespace must have a name and a list of tools", param="tools")
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tools: namespace {name[:80]!r} must have tools with names", param="tools")
    return [{**function, "name": flat_name(function["name"], name)} for function in functions]


def _nested(value: object) -> object:
    """Functions are flat here, and an object of their own in a chat."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": _without_type(value)}


def _without_type(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in function.items() if name != "type"}
