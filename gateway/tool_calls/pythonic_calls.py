"""Calls written as Python: f(a=1, b="x"), alone, one per line, or as a list. Their arguments become JSON."""

from __future__ import annotations

import ast
import json
import warnings

from outrider.gateway.tool_calls.context import MAX_HELD_CHARS, BodyContext, name_of
from outrider.gateway.tool_calls.reader import Reader, Step
from outrider.gateway.tool_calls.schemas import as_json
from outrider.gateway.tool_calls.symbols import is_symbol, without_surrogates

_WORDS = {"true": True, "false": False, "null": None}


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
        yield from _arguments(context)
        context.writer.end()
    if found and is_list:
        yield from reader.match("]")
    return found


def _starts_a_name(reader: Reader) -> Step[bool]:
    character = yield from reader.peek()
    return bool(character) and not is_symbol(character) and (character.isalpha() or character == "_")


def _arguments(context: BodyContext) -> Step[None]:
    reader, writer, opening = context.reader, context.writer, "{"
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(",")):
            continue
        if (yield from reader.match(")")):
            writer.arguments("{}" if opening == "{" else "}")
            return
        key = yield from _up_to(reader, "=,)")
        if not key.strip() or not (yield from reader.match("=")):
            writer.arguments(key)
            return
        writer.arguments(f"{opening}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        opening = ", "
        value = yield from _up_to(reader, ",)")
        is_whole = bool((yield from reader.peek()))
        writer.arguments(literal_as_json(value.strip()) if is_whole else value.strip())


def _up_to(reader: Reader, stops: str) -> Step[str]:
    """The text before one of the stops that is neither in brackets nor in a string."""
    text, depth, quote = "", 0, ""
    while (character := (yield from reader.peek())) and not is_symbol(character):
        if not quote and depth == 0 and character in stops:
            break
        text += yield from reader.take()
        if quote:
            if character == "\\":
                text += yield from reader.take()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if "=" in stops and len(text) > MAX_HELD_CHARS:
            break
    return text


def literal_as_json(text: str) -> str:
    """A Python literal, or JSON, as JSON; anything else as a string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know: the text is a model's
            value = _value(ast.parse(text, mode="eval").body)
        return without_surrogates(json.dumps(value, ensure_ascii=False))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return as_json(text, None)


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
                raise ValueError("not in JSON")
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case _:
            raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant):
        raise ValueError("not a key of JSON")
    return str(node.value)
