"""Gemma's calls: call:f{k:<|"|>text<|"|>,n:42,o:{a:[1,2]}}. Keys are bare, strings stand between quote markers."""

from __future__ import annotations

import json

from outrider.gateway.tool_calls.context import MAX_HELD_CHARS, BodyContext, escaped, name_of
from outrider.gateway.tool_calls.json_calls import json_string, json_value
from outrider.gateway.tool_calls.reader import Step
from outrider.gateway.tool_calls.schemas import as_json
from outrider.gateway.tool_calls.symbols import is_symbol

# levels; nested brackets that are read, each of which is a coroutine in another
_MAX_DEPTH = 64


def call(context: BodyContext) -> Step[bool]:
    """row.head comes before the name; row.value_begin is the quote."""
    reader = context.reader
    if not (yield from reader.match(context.row.head)):
        return False
    name = yield from name_of(reader)
    if not name or not (yield from reader.follows("{")) or not context.writer.begin(name):
        return False
    yield from _value(context, 0)
    context.writer.end()
    return True


def _value(context: BodyContext, depth: int) -> Step[None]:
    reader, writer, quote = context.reader, context.writer, context.row.value_begin
    if (yield from reader.match(quote)):
        yield from _string(context)
        return
    bracket = yield from reader.peek()
    if bracket == '"':  # JSON, as a grammar has it written
        yield from json_value(context, writer.arguments)
        return
    if bracket and bracket in "{[" and depth < _MAX_DEPTH:
        yield from reader.take()
        yield from _items(context, bracket, depth)
        return
    text = yield from _up_to(context, ",]}")
    if (yield from reader.peek()):
        text = as_json(text.strip(), None)
    writer.arguments(text)


def _items(context: BodyContext, bracket: str, depth: int) -> Step[None]:
    reader, writer = context.reader, context.writer
    closing, opening = ("}" if bracket == "{" else "]"), bracket
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(",")):
            continue
        character = yield from reader.peek()
        if character == closing:
            yield from reader.take()
            writer.arguments(bracket + closing if opening == bracket else closing)
            return
        if not character or character in "]}" or (is_symbol(character) and not (yield from _is_quoted(context))):
            return
        key = ""
        if bracket == "{":
            name = (yield from _up_to(context, ":,}")).strip()
            if not (yield from reader.match(":")):
                writer.arguments(name)
                return
            yield from reader.skip_space()
            key = f"{json.dumps(name, ensure_ascii=False)}: "
        writer.arguments(opening + key)
        opening = ", "
        yield from _value(context, depth + 1)


def _is_quoted(context: BodyContext) -> Step[bool]:
    return (yield from context.reader.follows(context.row.value_begin))


def _string(context: BodyContext) -> Step[None]:
    reader, writer, quote = context.reader, context.writer, context.row.value_begin
    writer.arguments('"')
    while not (yield from reader.match(quote)):
        more = (yield from reader.run(quote[0])) or (yield from reader.take())
        if not more:
            return
        writer.arguments(escaped(more))
    writer.arguments('"')


def _up_to(context: BodyContext, stops: str) -> Step[str]:
    """A key or a scalar: the text before a stop or a symbol, a quoted key without its quotes."""
    reader, text = context.reader, ""
    if (yield from reader.match(context.row.value_begin)):
        while not (yield from reader.match(context.row.value_begin)):
            character = yield from reader.take()
            if not character:
                break
            text += character
        return text
    if (yield from reader.peek()) == '"':
        return (yield from json_string(context)) or ""
    while (character := (yield from reader.peek())) and character not in stops and not is_symbol(character):
        text += yield from reader.take()
        if len(text) > MAX_HELD_CHARS:
            break
    return text
