"""Calls whose arguments stand in tags of their own: <function=f><parameter=k>v</parameter></function> and relatives."""

from __future__ import annotations

import json
from typing import Any

from outrider.gateway.tool_calls.context import MAX_HELD_CHARS, BodyContext, any_follows, escaped, name_of
from outrider.gateway.tool_calls.reader import Reader, Step
from outrider.gateway.tool_calls.schemas import as_json, is_only_string
from outrider.gateway.tool_calls.symbols import is_symbol

# count; ends of a value that may stand inside one JSON string, each of which is tried
_MAX_INNER_ENDS = 8


def tagged(context: BodyContext) -> Step[bool]:
    """<function=f><parameter=k>v</parameter></function>, and its relatives."""
    reader, row, writer = context.reader, context.row, context.writer
    yield from reader.skip_space()
    name = yield from name_of(reader)
    if not name or (row.separator and not (yield from reader.match(row.separator))):
        return False
    yield from reader.skip_space()
    if not row.separator and not (yield from any_follows(reader, (row.key_begin, row.end))):
        return False
    if not writer.begin(name):
        return False
    properties, opening = context.properties.get(name, {}), "{"
    while (yield from reader.match(row.key_begin)):
        key, is_string = yield from _key(context)
        if not (yield from reader.peek()):  # cut off: as JSON would be
            writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)[:-1]}" if key else "")
            return True
        if row.value_begin:
            yield from reader.skip_space()
            yield from reader.match(row.value_begin)
        writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        if is_string or (is_string is None and is_only_string(properties.get(key))):
            yield from _string_value(context)
        else:
            yield from _other_value(context, properties.get(key) if is_string is None else None)
        yield from reader.skip_space()
    if (yield from reader.peek()):
        writer.arguments("{}" if opening == "{" else "}")
    writer.end()
    return True


def _key(context: BodyContext) -> Step[tuple[str, bool | None]]:
    key = ""
    while True:
        for text, is_string in context.row.key_ends:
            if (yield from context.reader.match(text)):
                return key.strip(), is_string
        character = yield from context.reader.peek()
        if not character or is_symbol(character) or len(key) > MAX_HELD_CHARS:
            return key.strip(), None
        key += yield from context.reader.take()


def _string_value(context: BodyContext) -> Step[None]:
    """Passed on as it comes, JSON-escaped, without the newline on each side."""
    reader, writer, row = context.reader, context.writer, context.row
    writer.arguments('"')
    if not row.value_begin:
        yield from reader.match("\n")
    held = ""
    while not (yield from reader.match(row.value_end)):
        character = yield from reader.take()
        if not character:
            writer.arguments(escaped(held))
            return
        if held:
            writer.arguments(escaped(held))
        held = character if character == "\n" else ""
        if not held:
            writer.arguments(escaped(character))
    writer.arguments('"')


def _other_value(context: BodyContext, schema: Any) -> Step[None]:
    """Held to its end, then passed on as JSON; one that is cut off stays as it is."""
    text, ended = yield from _raw_value(context)
    context.writer.arguments(as_json(text.strip(), schema) if ended else text.strip())


def _raw_value(context: BodyContext) -> Step[tuple[str, bool]]:
    """The text up to the value's end, and whether the end is there. An end that stands inside a JSON string belongs to
    the value, if that string is closed later.
    """
    reader, end = context.reader, context.row.value_end
    parts: list[str] = []
    ended = True
    while ended and len(parts) <= _MAX_INNER_ENDS:
        part, ended = yield from _until(reader, end)
        parts.append(part)
        if ended and not _is_open_json(end.join(parts)):
            return end.join(parts), True
    if len(parts) > 1:  # no JSON after all: the first end was the end
        reader.unread(end.join(parts[1:]) + (end if ended else ""))
        ended = True
    return parts[0], ended


def _until(reader: Reader, end: str) -> Step[tuple[str, bool]]:
    text = ""
    while not (yield from reader.match(end)):
        more = (yield from reader.run(end[0])) or (yield from reader.take())
        if not more:
            return text, False
        text += more
    return text, True


def _is_open_json(text: str) -> bool:
    """Whether the text begins a JSON value and stops within one of its strings."""
    text = text.lstrip()
    if not text.startswith(("{", "[", '"')):
        return False
    in_string = escape = False
    for character in text:
        if escape:
            escape = False
        elif in_string and character == "\\":
            escape = True
        elif character == '"':
            in_string = not in_string
    return in_string
