"""The `messages` of a chat's body, checked: objects with a role and text.

Raises ValueError for pydantic, which names the field. Not here: what a template needs of them (tool_calls/messages.py).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from outrider.gateway.openai.fields import json_kind

# Parts that can be shown, and which of their fields is the text. Refusals are of an assistant elsewhere.
_TEXT_FIELDS = {"text": "text", "refusal": "refusal"}
# Fields of a message that no template shows: they would be lost. What to send in their place, if there is anything.
_NOT_SHOWN = {"function_call": "; use tool_calls", "audio": ""}


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(part)}")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXT_FIELDS:
        raise ValueError(f"{where} has type {str(kind)[:40]!r}; only text is supported")
    text = part.get(_TEXT_FIELDS[kind])
    if not isinstance(text, str):
        raise ValueError(f"{where} must have a text, got {json_kind(text)}")
    return text


def _message(message: object, where: str) -> dict[str, Any]:
    """Returns a message with its text parts joined by newlines, as vLLM does for text-only templates."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object, got {json_kind(message)}")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} must have a role")
    for name, advice in _NOT_SHOWN.items():
        if name in given:
            raise ValueError(f"{where}: {name} is not supported{advice}")
    content = given.get("content", given.get("refusal", ""))
    if isinstance(content, list):
        parts = [_part_text(part, f"{where} part {index}") for index, part in enumerate(content)]
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise ValueError(f"{where} must have text as content, got {json_kind(content)}")
    return {**given, "role": role, "content": content}


def _messages(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {json_kind(value)}")
    if not value:
        raise ValueError("must not be empty")
    return tuple(_message(message, f"entry {place}") for place, message in enumerate(value))


def _content_text(value: object) -> str:
    if isinstance(value, list | tuple):
        return "".join(_part_text(part, f"part {index}") for index, part in enumerate(value))
    if not isinstance(value, str):
        raise ValueError(f"must be text or a list of text parts, got {json_kind(value)}")
    return value


MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            "name": {"type": "string"},
        },
    },
}
Messages = Annotated[tuple[dict[str, Any], ...], PlainValidator(_messages), WithJsonSchema(MESSAGES_SCHEMA)]
PredictedContent = Annotated[
    str,
    PlainValidator(_content_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
