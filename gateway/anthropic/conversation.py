"""Anthropic's messages and system prompt as a chat's: their shape, checked and explained.

The functions raise ValueError, as pydantic wants it. Not here: tools (tools.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from outrider.gateway.openai.fields import json_kind

# Prefix of a system block that is dropped: Claude Code's first one differs with every request and would defeat the
# verifier's prefix cache.
_BILLING_HEADER = "x-anthropic-billing-header"
# Blocks of each role. redacted_thinking: encrypted for another server, so it is left out.
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


# Edits of the context, with a date behind: of old thinking, and of old tool results.
_CLEARING = ("clear_thinking_", "clear_tool_uses_")


def _chat_messages(value: object) -> tuple[dict[str, Any], ...]:
    """Converts Anthropic messages. Neighbouring messages of one role are one turn, as in Anthropic's API."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {json_kind(value)}")
    if not value:
        raise ValueError("must not be empty")
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    for place, message in enumerate(value):
        role, blocks = _turn(message, f"entry {place}")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return tuple(message for role, blocks in turns for message in _of_turn(role, blocks))


def _system(value: object) -> str:
    if isinstance(value, str):
        return value
    blocks = _blocks(value, ("text",), "")
    return "\n".join(block["text"] for block in blocks if not block["text"].startswith(_BILLING_HEADER))


def _turn(message: object, where: str) -> tuple[str, list[dict[str, Any]]]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _BLOCKS:
        raise ValueError(f"{where} must have one of the roles {', '.join(_BLOCKS)}")
    return role, _blocks(message.get("content"), _BLOCKS[role], f"{where} ")


def _blocks(content: object, allowed: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}must have text or a list of blocks as content, got {json_kind(content)}")
    return [_block(block, allowed, f"{where}block {place}") for place, block in enumerate(content)]


def _block(block: object, allowed: tuple[str, ...], where: str) -> dict[str, Any]:
    """Returns the parts of a block that are needed, checked for their types. Raises ValueError."""
    if not isinstance(block, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(block)}")
    kind = block.get("type")
    if kind not in allowed:
        raise ValueError(f"{where} has type {str(kind)[:40]!r}; only {', '.join(allowed)} can be read here")
    if kind in ("text", "thinking"):
        return {"type": kind, "text": _string(block, kind, where)}
    if kind == "tool_use":
        if not isinstance(block.get("input", {}), dict):
            raise ValueError(f"{where} must have an object as input, got {json_kind(block['input'])}")
        function = {"name": _string(block, "name", where), "arguments": block.get("input", {})}
        return {"type": kind, "call": {"id": _string(block, "id", where), "type": "function", "function": function}}
    if kind == "tool_result":
        return {"type": kind, "id": _string(block, "tool_use_id", where), "text": _result(block, where)}
    return {"type": kind}


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where} must have a string as {name}, got {json_kind(value)}")
    return value


def _result(block: Mapping[str, Any], where: str) -> str:
    """Returns a tool's result as text. Templates have no field for an error, so the text states it."""
    content, is_error = block.get("content"), block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise ValueError(f"{where}: is_error must be true or false, got {json_kind(is_error)}")
    text = "" if content is None else _text(_blocks(content, ("text",), f"{where} "))
    return f"Error: {text}" if is_error else text


def _text(blocks: list[dict[str, Any]]) -> str:
    """Joins the blocks' texts by newlines, like the text parts of a chat."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _of_turn(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of one turn. A user's tool results come before the user's text."""
    if role == "user":
        results = [
            {"role": "tool", "tool_call_id": block["id"], "content": block["text"]}
            for block in blocks
            if block["type"] == "tool_result"
        ]
        has_text = not results or any(block["type"] == "text" for block in blocks)
        return [*results, {"role": role, "content": _text(blocks)}] if has_text else results
    message: dict[str, Any] = {"role": role, "content": _text(blocks)}
    reasoning = "\n".join(block["text"] for block in blocks if block["type"] == "thinking")
    if reasoning:
        message["reasoning"] = reasoning
    calls = [block["call"] for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _edits(value: object) -> tuple[str, ...]:
    """Returns the edits' types. Nothing is cleared: it saves room, and a context that is too long is refused anyway."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {json_kind(value)}")
    types = tuple(str(edit.get("type", "")) if isinstance(edit, dict) else "" for edit in value)
    for place, kind in enumerate(types):
        if not kind.startswith(_CLEARING):
            raise ValueError(f"entry {place} has type {kind[:40]!r}; only edits that clear are accepted")
    return types


_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"type": "string", "enum": list(_BLOCKS)}, "content": _CONTENT_SCHEMA},
}
ChatMessages = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(_chat_messages),
    WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE_SCHEMA}),
]
SystemText = Annotated[str, PlainValidator(_system), WithJsonSchema(_CONTENT_SCHEMA)]
ContextEdits = Annotated[
    tuple[str, ...], PlainValidator(_edits), WithJsonSchema({"type": "array", "items": {"type": "object"}})
]
