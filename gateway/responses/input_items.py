"""The items of a response's input: their shape, checked and explained, and the chat messages that they are.

They raise ValueError, as pydantic wants it. Not here: the items of an output (output_items.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from outrider.gateway.openai.fields import json_kind
from outrider.gateway.responses.tools import custom_arguments, flat_name

_ROLES = ("user", "assistant", "system", "developer")
# Types of content parts, and which of their fields is the text.
_TEXT_FIELDS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
# Type of an item that refers to one stored by this server.
REFERENCE = "item_reference"
# Items of tools that ran elsewhere, and of contexts encrypted there: nothing in them can be shown to the model.
_SKIPPED = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call"),
        *("compaction", "compaction_summary", "context_compaction"),
    }
)
# Calls of tools that are built into OpenAI's models and run by the client, and the field that holds the action.
_BUILT_IN_CALLS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
# An item that brings tools.
TOOLS = "additional_tools"

Item = dict[str, Any]


def _input(value: object) -> tuple[Item, ...]:
    """Parses the input: a list of items, or a text, which is one message of the user."""
    if isinstance(value, str):
        return (_message({"role": "user", "content": value}, "it"),)
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a string or a list of items, got {json_kind(value)}")
    if not value:
        raise ValueError("must not be empty")
    return parse_items(value)


def parse_items(items: Sequence[object]) -> tuple[Item, ...]:
    """Parses items into one form that has the parts needed of each; ids are preserved. Raises ValueError."""
    return tuple(one for place, item in enumerate(items) for one in _items_of(item, f"entry {place}"))


def refers(items: Sequence[Item]) -> bool:
    return any(item["type"] == REFERENCE for item in items)


def _items_of(value: object, where: str) -> list[Item]:
    """Parses one item: into one as a rule, none if it is skipped, two for an MCP call."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(value)}")
    item = {name: entry for name, entry in value.items() if entry is not None}
    kind = item.get("type", REFERENCE if item.keys() == {"id"} else "message")
    if not isinstance(kind, str):
        raise ValueError(f"{where} must have a string as type, got {json_kind(kind)}")
    if kind in _SKIPPED:
        return []
    return _mcp_call(item, where) if kind == "mcp_call" else [_whole(kind, item, where)]


def _whole(kind: str, item: Item, where: str) -> Item:
    head = {"id": item["id"]} if isinstance(item.get("id"), str) else {}
    return {**head, **_content(kind, item, where), "status": "completed"}


def _mcp_call(item: Item, where: str) -> list[Item]:
    """Returns the call and its result."""
    own = {"call_id": item.get("id"), "output": _written(item.get("output", item.get("error", "")))}
    call = _content("function_call", {**item, **own}, where)
    result = _content("function_call_output", own, where)
    return [{**one, "status": "completed"} for one in (call, result)]


def _content(kind: str, item: Item, where: str) -> Item:
    match kind:
        case "message":
            return _message(item, where)
        case "item_reference":
            return {"type": REFERENCE, "id": _string(item, "id", where)}
        case "function_call" | "custom_tool_call":
            names = ["call_id", "name", "arguments" if kind == "function_call" else "input"]
            names += ["namespace"] if "namespace" in item else []
            return {"type": kind, **{name: _string(item, name, where) for name in names}}
        case "function_call_output" | "custom_tool_call_output":
            output = _text(item.get("output"), f"{where}: output")
            return {"type": kind, "call_id": _string(item, "call_id", where), "output": output}
        case "local_shell_call" | "shell_call" | "apply_patch_call":
            arguments = _written(item.get(_BUILT_IN_CALLS[kind]))
            call = {"call_id": _own_call_id(item), "name": kind[: -len("_call")], "arguments": arguments}
            return _content("function_call", call, where)
        case "local_shell_call_output" | "shell_call_output" | "apply_patch_call_output":
            result = {"call_id": _own_call_id(item), "output": _written(item.get("output", ""))}
            return _content("function_call_output", result, where)
        case "additional_tools" | "tool_search_output":
            if not isinstance(item.get("tools"), list):
                raise ValueError(f"{where} must have a list of tools, got {json_kind(item.get('tools'))}")
            return {"type": TOOLS, "tools": item["tools"]}
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            content = [{"type": "reasoning_text", "text": _text(parts, f"{where}: content")}]
            return {"type": "reasoning", "summary": [], "content": content}
        case other:
            advice = "only messages, reasoning, calls of tools and their outputs, and item_reference are"
            raise ValueError(f"{where} has type {other[:40]!r}, which is not supported; {advice}")


def _own_call_id(item: Item) -> object:
    """Returns the call id of a built-in tool's call, which for some of them is the item's id."""
    return item.get("call_id", item.get("id"))


def _written(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _message(item: Item, where: str) -> Item:
    role = _string(item, "role", where)
    if role not in _ROLES:
        raise ValueError(f"{where}: role must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    part = {"type": kind, "text": _text(item.get("content"), f"{where}: content")}
    return {"type": "message", "role": role, "content": [part]}


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where} must have a {name}, got {json_kind(value)}")
    return value


def _text(value: object, where: str) -> str:
    """Joins parts by newlines, as in a chat."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a string or a list of parts, got {json_kind(value)}")
    return "\n".join(_part(part, f"{where} part {place}") for place, part in enumerate(value))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _TEXT_FIELDS:
        raise ValueError(f"{where} has type {str(kind)[:40]!r}; only text is supported")
    return _string(part, _TEXT_FIELDS[kind], where)


InputItems = Annotated[
    tuple[Item, ...],
    PlainValidator(_input),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def tools_in(items: Sequence[Item]) -> list[object]:
    """Returns the tools that the conversation brings."""
    return [tool for item in items if item["type"] == TOOLS for tool in item["tools"]]


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the chat's messages. The reasoning, text and calls of one turn are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "additional_tools":  # which are among the tools
                pass
            case "function_call_output" | "custom_tool_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": item["content"][0]["text"]})
            case _:
                _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds the item to the last message if that is the assistant's and the item can follow, else to a new one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if item["type"] == "reasoning":
        if not item["content"][0]["text"]:  # encrypted, elsewhere
            return
        if last is None or last["content"] or "tool_calls" in last:
            messages.append(last := {"role": "assistant", "content": ""})
        last["reasoning"] = last.get("reasoning", "") + item["content"][0]["text"]
    elif item["type"] == "message":
        if last is None or (last["content"] and "tool_calls" not in last):
            messages.append(last := {"role": "assistant", "content": ""})
        last["content"] += item["content"][0]["text"]
    else:
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        arguments = item["arguments"] if item["type"] == "function_call" else custom_arguments(item["input"])
        function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
