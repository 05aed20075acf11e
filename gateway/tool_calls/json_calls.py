"""Calls whose arguments are JSON: an object with name and arguments, a list of them, or a name and then the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from outrider.gateway.tool_calls.context import BodyContext, name_of
from outrider.gateway.tool_calls.reader import Step
from outrider.gateway.tool_calls.symbols import is_symbol, without_surrogates

_SCALAR_ENDS = frozenset(",]}")


def json_value(context: BodyContext, sink: Callable[[str], None]) -> Step[bool]:
    """Passes on one value's characters. Ends where its brackets balance; earlier at a symbol, at an end marker outside
    of strings, and at the end of the text. Returns whether the value was complete.
    """
    reader, depth, in_string, escaped, started = context.reader, 0, False, False, False
    while True:
        character = yield from reader.peek()
        if not character or is_symbol(character) or context.held_too_long():
            return started and depth == 0 and not in_string
        if not in_string:
            if depth == 0 and started and (character in _SCALAR_ENDS or character.isspace()):
                return True
            for end in context.ends:
                if end[0] == character and (yield from reader.follows(end)):
                    return started and depth == 0
        yield from reader.take()
        sink(character)
        started = True
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        if depth <= 0 and not in_string and character in '}]"':
            return True


def json_string(context: BodyContext) -> Step[str | None]:
    """A whole string, decoded; None if none follows."""
    if (yield from context.reader.peek()) != '"':
        return None
    held: list[str] = []
    if not (yield from json_value(context, held.append)):
        return None
    try:
        value = json.loads("".join(held), strict=False)
    except ValueError:
        return None
    return without_surrogates(value) if isinstance(value, str) else None


def json_object(context: BodyContext) -> Step[bool]:
    """{"name": ..., "arguments": ...} in any order; other keys are passed over."""
    reader, row, writer = context.reader, context.row, context.writer
    began, model_id, num_chars = False, "", 0
    held: list[str] = []

    def sink(text: str) -> None:
        nonlocal num_chars
        num_chars += len(text)
        writer.arguments(text) if began else held.append(text)

    if not (yield from reader.match("{")):
        return False
    while not context.held_too_long():
        yield from reader.skip_space()
        if (yield from reader.match(",")):
            continue
        if (yield from reader.match("}")):
            break
        key = yield from json_string(context)
        yield from reader.skip_space()
        if key is None or not (yield from reader.match(":")):
            break
        yield from reader.skip_space()
        if key == row.name_key and not began:
            name = yield from json_string(context)
            if not name or not writer.begin(name, model_id):
                return False
            began = True
            writer.arguments("".join(held))
        elif key in (row.arguments_key, "arguments", "parameters") and not num_chars:
            yield from _arguments(context, sink)
        else:
            value: list[str] = []
            yield from json_value(context, value.append)
            model_id = "".join(value).strip('"') if row.id_key and key == row.id_key else model_id
    if not began:
        return False
    if not num_chars and (yield from reader.peek()):
        writer.arguments("{}")
    writer.end()
    return True


def _arguments(context: BodyContext, sink: Callable[[str], None]) -> Step[None]:
    """A JSON value as it is; one that is written as a string, decoded once."""
    if (yield from context.reader.peek()) != '"':
        yield from json_value(context, sink)
        return
    held: list[str] = []
    yield from json_value(context, held.append)
    text = "".join(held)
    try:
        sink(without_surrogates(str(json.loads(text, strict=False))))
    except ValueError:
        sink(text)


def json_array(context: BodyContext) -> Step[bool]:
    """[{...}, {...}], or one object. True if at least one call was there."""
    reader = context.reader
    if not (yield from reader.match("[")):
        return (yield from json_object(context))
    found = False
    while True:
        yield from reader.skip_space()
        if not (yield from reader.follows("{")):
            break
        if not (yield from json_object(context)):
            break
        found = True
        yield from reader.skip_space()
        if not (yield from reader.match(",")):
            break
    if found:
        yield from reader.match("]")
    return found


def named(context: BodyContext) -> Step[bool]:
    """f[ARGS]{...}: head, name, perhaps an id, separator, JSON."""
    reader, row = context.reader, context.row
    yield from reader.skip_space()
    if (yield from reader.follows("[")):  # an older form of the same model
        return (yield from json_array(context))
    if row.head and not (yield from reader.match(row.head)):
        return False
    name, model_id = (yield from name_of(reader)), ""
    if row.numbered_names:
        model_id, name = name, name.rpartition(":")[0].removeprefix("functions.")
    if row.id_separator and (yield from reader.match(row.id_separator)):
        model_id = yield from name_of(reader)
    if not name:
        return False
    yield from reader.skip_space()
    if not (yield from reader.match(row.separator)) or not context.writer.begin(name, model_id):
        return False
    yield from reader.skip_space()
    yield from _json_or_nothing(context)
    context.writer.end()
    if row.separator.startswith("```"):
        yield from reader.skip_space()
        yield from reader.match("```")
    return True


def _json_or_nothing(context: BodyContext) -> Step[None]:
    written: list[str] = []

    def sink(text: str) -> None:
        written.append(text)
        context.writer.arguments(text)

    yield from json_value(context, sink)
    if not written and (yield from context.reader.peek()):
        context.writer.arguments("{}")
