"""Reads an answer back from its JSON, or from the server-sent events of its stream."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from outrider.shared.errors import InvalidRequest
from outrider.shared.strict_json import strict_json

# The member of an answer in which the events of a stream stand one by one: of an API whose events have a type.
EVENTS = "events"


def read_answer(text: str, name: str) -> dict[str, Any]:
    """Returns an answer from its JSON, or the one that the server-sent events of a stream come to, whose choices have
    a `delta` for a message; that of a response or of Anthropic's message has its events. Raises InvalidRequest, which
    calls the text `name`.
    """
    if text.lstrip()[:1] == "{":
        return _object(text, name)
    lines = (line.removeprefix("data:").strip() for line in text.split("\n") if line.startswith("data:"))
    events = [_object(line, name) for line in lines if line != "[DONE]"]
    if not events:
        raise InvalidRequest(f"{name}: neither a JSON object nor a stream of events", param="FILE")
    if "type" in events[0]:
        holders = [event.get("response") if "response" in event else event for event in events]
        receipts = [holder["receipt"] for holder in holders if isinstance(holder, dict) and "receipt" in holder]
        events = [event for event in events if event.get("type") != "ping"]  # Anthropic's client passes over them
        return {EVENTS: events, **({"receipt": receipts[-1]} if receipts else {})}
    choices = _joined(event.get("choices") for event in events)
    return {**events[-1], "choices": choices}


def _object(text: str, name: str) -> dict[str, Any]:
    value = strict_json(text, name, "FILE")
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: no JSON object", param="FILE")
    return value


def _joined(parts: Iterable[Any]) -> Any:
    """Returns the value that a member comes to over all events: texts and lists are continued, null says nothing, and
    entries of a list that have an index belong together by it.
    """
    parts = [part for part in parts if part is not None]
    kinds = {type(part) for part in parts}
    if kinds == {str}:
        return "".join(parts)
    if kinds == {dict}:
        return {name: _joined(values) for name, values in _by_key(chain(*(part.items() for part in parts))).items()}
    if kinds == {list}:
        entries = list(chain(*parts))
        if not all(isinstance(entry, dict) and isinstance(entry.get("index"), int) for entry in entries):
            return entries
        return [_joined(values) for _, values in sorted(_by_key((entry["index"], entry) for entry in entries).items())]
    return parts[-1] if parts else None


def _by_key(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
