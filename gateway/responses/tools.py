"""The tools of a response as a chat's, which has functions alone. What is wrong in either form stays as it is.

A custom tool, whose calls have one text as input, is a function with one string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.openai.fields import json_kind
from outrider.gateway.responses.custom_grammar import custom_pattern
from outrider.shared.errors import InvalidRequest

# Built into OpenAI's servers and models; agents send them unasked. As vLLM, they are not shown to the model.
_BUILT_IN = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "tool_search"),
    *("local_shell", "shell", "apply_patch"),
)
# The argument of the function that stands for a custom tool.
_INPUT = "input"
# The beginning of arguments that max_tokens has cut; complete escapes only.
_CUT_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)')
# Fields of a function that say how it gets to the model, not what it does.
_NOT_SHOWN = ("type", "defer_loading", "allowed_callers")
# Between the names of a namespace and of a function in it; vLLM's.
_SEPARATOR = "__"


def chat_tools(value: object) -> list[object]:
    """Raises InvalidRequest."""
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"tools must be a list, got {json_kind(value)}", param="tools")
    return [_nested(function) for tool in served_tools(value) for function in _functions(tool)]


def served_tools(tools: Sequence[object]) -> list[object]:
    """Returns the tools without built-in kinds and their newer versions: `web_search_preview`, or one with a date."""
    return [tool for tool in tools if not _kind(tool).startswith(_BUILT_IN)]


def chat_choice(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        nested = [_nested(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": nested}}
    return _nested(value)


def flat_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


@dataclass(frozen=True)
class CalledTool:
    """The part of a call's item that names its tool. names: its name, and its namespace if it has one."""

    names: Mapping[str, str]
    is_custom: bool


def called_tools(tools: Sequence[Any]) -> dict[str, CalledTool]:
    """Maps the flat names of a chat to the tools whose calls are shown differently from a plain function's."""
    found: dict[str, CalledTool] = {}
    for tool in tools:
        if _kind(tool) == "custom":
            found[tool["name"]] = CalledTool({"name": tool["name"]}, is_custom=True)
        elif _kind(tool) == "namespace":
            for inner in tool["tools"]:
                names = {"namespace": tool["name"], "name": inner["name"]}
                found[flat_name(inner["name"], tool["name"])] = CalledTool(names, _kind(inner) == "custom")
    return found


def custom_arguments(text: str) -> str:
    """Returns a custom tool's input as the arguments of the function that stands for it."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Returns the input in a model's arguments, maybe under another name; that of cut ones as far as it goes."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        begun = _CUT_INPUT.match(arguments)
        value = {_INPUT: json.loads(f'"{begun[1]}"', strict=False)} if begun else None
    if isinstance(value, dict) and _INPUT not in value and len(value) == 1:
        value = {_INPUT: next(iter(value.values()))}
    found = value.get(_INPUT) if isinstance(value, dict) else None
    if not isinstance(found, str):
        return arguments
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kind(tool: Any) -> str:
    return str(tool.get("type", "")) if isinstance(tool, dict) else ""


def _functions(tool: object) -> list[object]:
    """Returns a namespace's functions under their flat names; any other tool unchanged. Raises InvalidRequest."""
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return [tool]
    name, functions = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(functions, list):
        raise InvalidRequest("tools: a namespace must have a name and a list of tools", param="tools")
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tools: namespace {name[:80]!r} must have tools with names", param="tools")
    return [{**function, "name": flat_name(function["name"], name)} for function in functions]


def _nested(value: Any) -> object:
    """Nests a function: functions are flat here, and an object of their own in a chat."""
    if _kind(value) == "custom":
        return {"type": "function", "function": _custom_function(value)}
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": _shown(value)}


def _custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function that stands for a custom tool. tool: of type custom, from the tools, or from tool_choice,
    where it has only a name. Raises InvalidRequest.
    """
    form = tool.get("format") or {"type": "text"}
    text: dict[str, Any] = {"type": "string"}
    if _kind(form) == "grammar":
        text["pattern"] = custom_pattern(form, str(tool.get("name"))[:80])
    elif _kind(form) != "text":
        raise InvalidRequest("tools: a custom tool's format must have the type text or grammar", param="tools")
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    described = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {**described, "parameters": parameters, "strict": "pattern" in text}


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are the model's to see. A function whose loading is deferred is there from the start, as
    no tool looks for it. Raises InvalidRequest.
    """
    callers = function.get("allowed_callers")
    if callers and (not isinstance(callers, list) or "direct" not in callers):
        named = str(function.get("name"))[:80]
        raise InvalidRequest(f"tools: {named!r}: allowed_callers without direct is not supported", param="tools")
    return {name: entry for name, entry in function.items() if name not in _NOT_SHOWN}
