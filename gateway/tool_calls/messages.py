"""A conversation with tool calls as chat templates expect it: what OpenAI's clients send, in the templates' terms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.tool_calls.chat_parts import MISTRAL_ID_CHARS
from outrider.gateway.tool_calls.lenient_json import repaired
from outrider.shared.errors import InvalidRequest

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Part of the error that Mistral's templates raise for other ids.
_WANTS_SHORT_IDS = "length 9"


def template_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Returns messages for the template: arguments as objects, and reasoning under the template's own key. Developer
    messages become system messages where the template knows none, joined to a system message before them, as many
    templates take only one. Raises InvalidRequest.
    """
    chat: list[dict[str, Any]] = []
    # Texts of the system messages that others are joined to, by place in chat; joined once, which takes linear time.
    texts: dict[int, list[str]] = {}
    for place, message in enumerate(messages):
        entry = _entry(message, template, f"messages.{place}")
        was_developer = entry["role"] == "system" and message["role"] == "developer"
        if was_developer and chat and chat[-1]["role"] == "system":
            texts.setdefault(len(chat) - 1, [chat[-1]["content"]]).append(entry["content"])
        else:
            chat.append(entry)
    for place, joined in texts.items():
        chat[place]["content"] = "\n\n".join(joined)
    return chat


def _entry(message: Mapping[str, Any], template: str, where: str) -> dict[str, Any]:
    entry = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
    if entry["role"] == "developer" and "developer" not in template:
        entry["role"] = "system"
    if entry["role"] == "assistant":
        reasoning = next((message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str)), "")
        for key in _REASONING_KEYS:
            if reasoning and key in template:
                entry[key] = reasoning
                break
        if entry.get("tool_calls"):
            calls = entry["tool_calls"]
            if not isinstance(calls, list):
                raise InvalidRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
            entry["tool_calls"] = [_call(call, template, f"{where}.tool_calls.{n}") for n, call in enumerate(calls)]
        else:
            entry.pop("tool_calls", None)  # templates ask whether it is there
    if entry["role"] == "tool":
        if not isinstance(entry.get("tool_call_id"), str):
            raise InvalidRequest(f"{where} must have a tool_call_id", param=f"{where}.tool_call_id")
        entry["tool_call_id"] = _id(entry["tool_call_id"], template)
    return entry


def _call(call: object, template: str, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Models make mistakes in their JSON. Arguments that are no JSON at all must not end the conversation either:
        # the tool has already answered them.
        written = repaired(arguments)
        arguments = None if written is None else json.loads(written)
    kept = arguments if isinstance(arguments, dict) else {}
    shown = {"type": "function", "function": {**function, "arguments": kept}}
    return {**shown, "id": _id(call["id"], template)} if isinstance(call.get("id"), str) else shown


def _id(ident: str, template: str) -> str:
    if _WANTS_SHORT_IDS not in template or (len(ident) == MISTRAL_ID_CHARS and ident.isalnum()):
        return ident
    return hashlib.sha256(ident.encode()).hexdigest()[:MISTRAL_ID_CHARS]


def template_variables(effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns template variables for reasoning_effort: its value, and whether to reason. The caller's own win."""
    if effort is None:
        return dict(given or {})
    reasons = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": reasons, "thinking": reasons, **(given or {})}
