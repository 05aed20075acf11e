"""Calls whose arguments are JSON: an object with name and arguments, a list of them, or a name and then the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from outrider.gateway.tool_calls.context import BodyContext, name_of
from outrider.gateway.tool_calls.lenient_json import repaired
from outrider.gateway.tool_calls.reader import Step


def json_object(context: BodyContext) -> Step[bool]:
    """{"name": ..., "arguments": ...} in any order; other keys are passed over."""
    reader, row, writer = context.reader, context.row, context.writer
    began, has_arguments, model_id = False, False, ""
    held: list[str] = []

    def sink(text: str) -> None:
        writer.arguments(text) if began else held.append(text)

    if not (yield from reader.match("{")):
        return False
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(",")):
            continue
        if (yield from reader.match("}")):
            break
        key = yield from context.json(sink).text()
        yield from reader.skip_space()
        if key is None or not (yield from reader.match(":")):
            break
        yield from reader.skip_space()
        if key == row.name_key and not began:
            name = yield from context.json(sink).text()
            if not name or not writer.begin(name, model_id):
                return False
            began = True
            writer.arguments("".join(held))
        elif key in (row.arguments_key, "arguments", "parameters") and not has_arguments:
            if not began and context.may_hold_all:
                reader.hold_all()
            has_arguments = yield from _arguments(context, sink)
        else:
            value: list[str] = []
            yield from context.json(value.append).value()
            model_id = "".join(value).strip('"') if row.id_key and key == row.id_key else model_id
    if not began:
        return False
    if not has_arguments and not reader.ended_by_cut:
        writer.arguments("{}")
    writer.end()
    return True


def _arguments(context: BodyContext, sink: Callable[[str], None]) -> Step[bool]:
    """Reads a JSON value; one that is written as a string is decoded once. Returns False if there is none."""
    if (yield from context.reader.peek()) not in ('"', "'"):
        return (yield from context.json(sink).value())
    held: list[str] = []
    yield from context.json(held.append).value()
    text = "".join(held)
    if not context.reader.ended_by_cut:
        text = repaired(json.loads(text)) or text
    sink(text)
    return True


def json_array(context: BodyContext) -> Step[bool]:
    """[{...}, {...}], or one object. True if at least one call was there."""
    reader = context.reader
    if not (yield from reader.match("[")):
        return (yield from json_object(context))
    found = False
    while True:
        yield from reader.skip_space()
        if found:
            reader.mark()
        if not (yield from json_object(context)):
            break
        found = True
        yield from reader.skip_space()
        if not (yield from reader.match(",")):
            break
    if found:
        reader.rewind()  # to an object that is no call
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
    yield from context.value_or_object(context.json(context.writer.arguments))
    context.writer.end()
    if row.separator.startswith("```"):
        yield from reader.skip_space()
        yield from reader.match("```")
    return True


def gemma(context: BodyContext) -> Step[bool]:
    """call:f{k:<|"|>text<|"|>,n:42,o:{a:[1,2]}}: bare keys, strings between the row's value_begin."""
    reader = context.reader
    if not (yield from reader.match(context.row.head)):
        return False
    name = yield from name_of(reader)
    if not name or not (yield from reader.follows("{")) or not context.writer.begin(name):
        return False
    yield from context.value_or_object(context.json(context.writer.arguments, quote=context.row.value_begin))
    context.writer.end()
    return True
