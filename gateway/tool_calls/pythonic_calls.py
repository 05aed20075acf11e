"""Calls written as Python: f(a=1, b="x"), alone, one per line, or as a list. Their arguments become JSON."""

from __future__ import annotations

import json

from outrider.gateway.tool_calls.context import MAX_HELD_CHARS, BodyContext, name_of
from outrider.gateway.tool_calls.reader import Reader, Step, outside
from outrider.gateway.tool_calls.symbols import is_symbol

_NAME_ENDS = outside("=,()[]{}\"'\n")


def calls(context: BodyContext) -> Step[bool]:
    """True if at least one call was there."""
    reader = context.reader
    is_list = yield from reader.match("[")
    found = False
    while True:
        yield from reader.skip_space()
        if found and (yield from reader.match(",")):
            yield from reader.skip_space()
        if not (yield from _starts_a_name(reader)):
            break
        name = yield from name_of(reader)
        is_call = yield from reader.follows("(")
        if not is_call or not context.writer.begin(name):
            if found:
                reader.unread(name)
            return found
        yield from reader.take()
        found = True
        yield from _arguments(context, list(context.properties.get(name, ())))
        context.writer.end()
    if found and is_list:
        yield from reader.match("]")
    return found


def _starts_a_name(reader: Reader) -> Step[bool]:
    character = yield from reader.peek()
    return bool(character) and not is_symbol(character) and (character.isalpha() or character == "_")


def _arguments(context: BodyContext, names: list[str]) -> Step[None]:
    """Reads the arguments. names: those of the arguments, for values that are written without one."""
    reader, writer, num_read = context.reader, context.writer, 0
    value = context.json(writer.arguments, is_python=True)
    while True:
        yield from reader.skip_space()
        character = yield from reader.peek()
        if character == ",":
            yield from reader.take()
            continue
        if not character or character in ")]}" or (yield from value.ends_here(character)):
            break
        key = (yield from _key(reader)) or (names[num_read] if num_read < len(names) else f"argument_{num_read}")
        writer.arguments(f"{', ' if num_read else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        num_read += 1
        yield from reader.skip_space()
        if not (yield from value.value()) and not reader.ended_by_cut:
            writer.arguments("null")
    if not reader.ended_by_cut:
        writer.arguments("}" if num_read else "{}")
    yield from reader.match(")")


def _key(reader: Reader) -> Step[str]:
    """Reads the name before an equals sign, and the sign; returns "" if a value follows."""
    reader.mark(MAX_HELD_CHARS)
    key = ""
    while more := (yield from reader.run(_NAME_ENDS)):
        key += more
    if key.strip() and (yield from reader.match("=")):
        reader.forget()
        return key.strip()
    reader.rewind()
    return ""
