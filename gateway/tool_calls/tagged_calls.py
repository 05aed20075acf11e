"""Calls whose arguments stand in tags of their own: <function=f><parameter=k>v</parameter></function> and relatives.

A tag ends a value only where what may follow it does: a value may well hold the same characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from outrider.gateway.schemas.keywords import is_only_string, kind_of, types_of
from outrider.gateway.tool_calls.context import MAX_HELD_CHARS, BodyContext, escaped, name_of
from outrider.gateway.tool_calls.lenient_json import PYTHON_WORDS, repaired
from outrider.gateway.tool_calls.reader import Step, outside
from outrider.gateway.tool_calls.symbols import is_symbol
from outrider.shared.errors import InvalidRequest
from outrider.shared.strict_json import strict_json

_DIGITS = re.compile(r"[0-9]{0,9}")
# elements; deepest nesting that is read; vLLM's limit
_DEEPEST = 128
# What an element's text is called where it stands between further elements; as vLLM calls it.
_MIXED_TEXT = "$text"
# ends; tried within one JSON string before the first one is taken as the value's end
_MAX_INNER_ENDS = 8


def tagged(context: BodyContext) -> Step[bool]:
    """<function=f><parameter=k>v</parameter></function>, and its relatives."""
    reader, row, writer = context.reader, context.row, context.writer
    yield from reader.skip_space()
    name = yield from name_of(reader)
    if not name or (row.separator and not (yield from reader.match(row.separator))):
        return False
    if row.number_end:
        yield from reader.run(_DIGITS)
        if not (yield from reader.match(row.number_end)):
            return False
    yield from reader.skip_space()
    if not row.separator and not (yield from reader.any_follows((row.key_begin, row.end))):
        return False
    if not writer.begin(name):
        return False
    properties, opening = context.properties.get(name, {}), "{"
    value = _Value(context, properties)
    while (yield from reader.match(row.key_begin)):
        key, is_string = yield from _key(context)
        if not (yield from reader.peek()):
            written = opening + json.dumps(key, ensure_ascii=False)
            writer.arguments("" if not key else written[:-1] if reader.ended_by_cut else f"{written}: null")
            opening = ", " if key else opening
            break
        if row.value_begin:
            yield from reader.skip_space()
            yield from reader.match(row.value_begin)
        writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        schema = properties.get(key) if is_string is None else None
        if is_string or (is_string is None and is_only_string(schema)):
            yield from value.as_string()
        else:
            yield from value.as_other(schema)
        yield from reader.skip_space()
    if not reader.ended_by_cut:
        writer.arguments("{}" if opening == "{" else "}")
    writer.end()
    return True


@dataclass
class _Element:
    """An element with its text and the elements in it, in the order in which they were written."""

    name: str
    text: list[str] = field(default_factory=list)
    inner: list[_Element] = field(default_factory=list)


def nested(context: BodyContext) -> Step[bool]:
    """<invoke name="f"><k>v</k><list><item>v</item></list></invoke>, each tag behind the family's own mark.

    The arguments are passed on when all have been read: a name that comes again makes a list of what it had before.
    """
    reader, row, writer = context.reader, context.row, context.writer
    name = yield from name_of(reader)
    if not name or not (yield from reader.match(row.separator)) or not writer.begin(name):
        return False
    elements = yield from _elements(context)
    written = _object(elements, {"properties": context.properties.get(name, {})})
    writer.arguments(written if not reader.ended_by_cut else "" if written == "{}" else written[:-1])
    writer.end()
    return True


def _elements(context: BodyContext) -> Step[list[_Element]]:
    """Reads elements up to what is none, and leaves out one that is cut.

    Within an element, a tag that does not close it is text.
    """
    reader, row = context.reader, context.row
    open_ones, plain = [_Element("")], outside(row.key_begin[0])
    mark, close = row.key_begin.removesuffix("<"), row.key_ends[0][0]
    stops = tuple(marker for marker in (row.end, row.begin, *row.section) if marker)
    while True:
        last, is_within = open_ones[-1], len(open_ones) > 1
        if not is_within:
            yield from reader.skip_space()
        if (yield from reader.follows(mark)):
            if is_within and (yield from reader.match(f"{row.value_end}{last.name}{close}")):
                open_ones.pop()
                continue
            if (yield from reader.any_follows(stops)):
                break
            if not (yield from reader.follows(row.value_end)) and (yield from reader.match(row.key_begin)):
                key, _ = yield from _key(context)
                last.inner.append(_Element(key))
                if len(open_ones) <= _DEEPEST:
                    open_ones.append(last.inner[-1])
                continue
        text = ((yield from reader.run(plain)) or (yield from reader.take())) if is_within else ""
        if not text:
            break
        last.text.append(text)
    if len(open_ones) > 1 and reader.ended_by_cut:
        open_ones[0].inner.pop()
    return open_ones[0].inner


def _object(elements: list[_Element], schema: Any) -> str:
    """Writes elements as the members of a JSON object."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    others = schema.get("additionalProperties") if isinstance(schema, dict) else None
    members: dict[str, list[str]] = {}
    for element in elements:
        known = properties.get(element.name, others) if isinstance(properties, dict) else others
        members.setdefault(element.name, []).append(_content(element, known))
    written = {name: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for name, values in members.items()}
    return f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: {value}' for name, value in written.items())}}}"


def _content(element: _Element, schema: Any) -> str:
    """Writes an element's content as JSON."""
    text, types = "".join(element.text), types_of(schema)
    if not element.inner:
        if is_only_string(schema):
            return json.dumps(text, ensure_ascii=False)
        if not text.strip() and not types.isdisjoint(("array", "object")) and "string" not in types:
            return "[]" if "array" in types else "{}"
        return as_json(text.strip(), schema)
    inner = [*element.inner, *([_Element(_MIXED_TEXT, [text])] if text.strip() else ())]
    if "array" in types:
        return f"[{', '.join(_content(one, schema.get('items')) for one in inner)}]"
    return _object(inner, schema)


def _key(context: BodyContext) -> Step[tuple[str, bool | None]]:
    reader, key_ends, key = context.reader, context.row.key_ends, ""
    plain = _plain_key("".join([text[0] for text, _ in key_ends]))
    while True:
        for text, is_string in key_ends:
            if (yield from reader.match(text)):
                return key.strip(), is_string
        character = yield from reader.peek()
        if not character or is_symbol(character) or len(key) > MAX_HELD_CHARS:
            if len(key) > MAX_HELD_CHARS:  # as much of it, however it was cut
                reader.unread(key[MAX_HELD_CHARS + 1 :])
            return key[: MAX_HELD_CHARS + 1].strip(), None
        key += (yield from reader.run(plain)) or (yield from reader.take())


@lru_cache(maxsize=16)
def _plain_key(stops: str) -> re.Pattern[str]:
    """Returns a regex of what is neither the beginning of a key's end nor a symbol."""
    return re.compile(f"[^{re.escape(stops)}\ud800-\udfff]*")


class _Value:
    """Reader of an argument's value: the text between a key and the next one, or the call's end."""

    def __init__(self, context: BodyContext, properties: Any) -> None:
        self._context = context
        self._properties = properties
        self._has_end = False
        row = context.row
        self._after = tuple(marker for marker in (row.begin, *row.around()) if marker)
        self._stops = "".join({marker[0] for marker in (row.value_end, row.key_begin, row.end, *self._after)})

    def as_string(self) -> Step[None]:
        """Passes the value on as it comes, JSON-escaped, without the newline on each side that is none of it."""
        reader, writer, newline = self._context.reader, self._context.writer, ""
        is_verbatim = self._context.row.is_verbatim
        writer.arguments('"')
        if not self._context.row.value_begin and not is_verbatim:
            yield from reader.match("\n")
        plain = outside(self._stops + "\n")
        while True:
            more = yield from reader.run(plain)
            if not more and not (yield from reader.follows("\n")) and (yield from self._ends()):
                break
            more = more or (yield from reader.take())
            if more and newline:
                writer.arguments("\\n")
            newline = more if more == "\n" and not is_verbatim else ""
            if not newline:
                writer.arguments(escaped(more))
        writer.arguments('"' if not reader.ended_by_cut else "\\n" if newline else "")

    def as_other(self, schema: Any) -> Step[None]:
        """Holds the value to its end, then passes it on as JSON; one that is cut off stays as it is. An end marker
        inside a JSON string belongs to the value, if that string is closed later.
        """
        reader, end = self._context.reader, self._context.row.value_end
        parts = [(yield from self._text())]
        while len(parts) <= _MAX_INNER_ENDS and self._has_end and _is_open_json(end.join(parts)):
            parts.append((yield from self._text()))
        if len(parts) > 1 and _is_open_json(end.join(parts)):  # no JSON after all: the first end was the end
            reader.unread(end.join(parts[1:]) + (end if self._has_end else ""))
            parts = parts[:1]
        text = end.join(parts).strip()
        self._context.writer.arguments(text if reader.ended_by_cut else as_json(text, schema))

    def _text(self) -> Step[str]:
        parts, plain = list[str](), outside(self._stops)
        while True:
            while more := (yield from self._context.reader.run(plain)):
                parts.append(more)
            if (yield from self._ends()):
                return "".join(parts)
            parts.append((yield from self._context.reader.take()))

    def _ends(self) -> Step[bool]:
        """Takes the value's end tag. Another tag ends it too, where the value's is missing, and stays."""
        reader, row = self._context.reader, self._context.row
        self._has_end = yield from self._if(self._is_followed, row.value_end, (row.key_begin, row.end, *self._after))
        if self._has_end or not (yield from reader.peek()):
            yield from reader.match(row.value_end)
            return True
        for marker in (row.end, *self._after):
            if is_symbol(marker[0]) and (yield from reader.follows(marker)):
                return True
        if (yield from self._if(self._is_followed, row.end, self._after)):
            return True
        return (yield from self._if(self._is_key, row.key_begin, ()))

    def _if(self, test: Callable[[tuple[str, ...]], Step[bool]], marker: str, after: tuple[str, ...]) -> Step[bool]:
        """Returns whether `marker` follows and the test is true of what comes after it. Takes nothing."""
        reader = self._context.reader
        reader.mark()
        found = bool(marker) and (yield from reader.match(marker)) and (yield from test(after))
        reader.rewind()
        return found

    def _is_followed(self, after: tuple[str, ...]) -> Step[bool]:
        reader = self._context.reader
        yield from reader.skip_space()
        character = yield from reader.peek()
        return not character or is_symbol(character) or (yield from reader.any_follows(after))

    def _is_key(self, _after: tuple[str, ...]) -> Step[bool]:
        """Returns whether one of the tool's arguments begins."""
        for key in self._properties:
            for end, _ in self._context.row.key_ends:
                if (yield from self._context.reader.follows(key + end)):
                    return True
        return False


def _is_open_json(text: str) -> bool:
    """Returns whether the text begins a JSON value and stops within one of its strings."""
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


def as_json(text: str, schema: Any) -> str:
    """A value's text as JSON: what the schema's types make of it, and a string otherwise. Where they allow strings too,
    or say nothing, it is another value only if it is JSON, or a word of Python's, as it stands.
    """
    types = types_of(schema)
    may_be_string = not types or "string" in types
    try:
        found, kinds = text, kind_of(strict_json(text, "a value"))
    except InvalidRequest:
        written = PYTHON_WORDS.get(text) or (None if may_be_string else repaired(text))
        if written is None:
            return json.dumps(text, ensure_ascii=False)
        found, kinds = written, kind_of(json.loads(written))
    if not types or not may_be_string or "string" in kinds or not kinds.isdisjoint(types):
        return found
    return json.dumps(text, ensure_ascii=False)
