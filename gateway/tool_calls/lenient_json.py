"""JSON as models write it, passed on as strict JSON while it comes. What is JSON stays as it is.

Read besides it: raw control characters, escapes that JSON does not know, quotes within a string, single and triple
quotes, Python's words, numbers, tuples and prefixes, bare keys and words, missing or trailing commas, brackets that do
not match, and an end that is missing. Not read: comments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from outrider.gateway.tool_calls.reader import Reader, Step
from outrider.gateway.tool_calls.symbols import is_symbol

# levels; nesting of brackets, beyond which they are text; readers of JSON recurse
_MAX_DEPTH = 100
# characters; a longer number is text: Python refuses to read more than 4,300 digits
_MAX_NUMBER_CHARS = 300
_PAIRS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}
_CLOSING = "}])"
_QUOTES = "\"'"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS = {"true": "true", "false": "false", "null": "null", **PYTHON_WORDS}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[-+]?(0[xXoObB][0-9a-fA-F_]+|[1-9][0-9_]*|([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?)")
_PREFIXES = frozenset(("r", "b", "u", "f", "rb", "br", "fr", "rf"))
_NOT_JSON_SPACE = re.compile(r"[^ \t\n\r]")
_HEX = frozenset("0123456789abcdefABCDEF")
_REPLACEMENT = "\\ufffd"


@lru_cache(maxsize=64)
def _outside(stops: str) -> re.Pattern[str]:
    """Returns a regex of any characters but these and symbols."""
    return re.compile(f"[^{re.escape(stops)}\ud800-\udfff]*")


# Numbers, each with a comma after it: lists of them can be long.
_ITEMS = re.compile(r"(?:-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,16})?[ \t\n\r]*,[ \t\n\r]*)*")
# The beginning of a number; a short one that is whole.
_DIGITS, _INTEGER = re.compile("[-0-9]*"), re.compile("-?(?:0|[1-9][0-9]{0,15})")
# Text that may be copied unchanged between quotes of either kind, complete escapes included.
_PLAIN = {
    '"': re.compile(
        r'(?:[^"\\\x00-\x1f\ud800-\udfff]+|\\["\\bfnrt]|\\u(?:[0-9abcefABCEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})*'
    ),
    "'": re.compile(r"""(?:[^'"\\\x00-\x1f\ud800-\udfff]+|\\["\\bfnrt])*"""),
}


@dataclass
class _Level:
    """A bracket that is open: how it ends in the text, and in JSON. held: a comma that awaits the next item."""

    closing: str
    shown: str
    has_items: bool = False
    held: str = ""


@dataclass
class LenientJson:
    """Reads values from `reader`; `sink` gets their strict JSON. ends: markers that end a value outside of strings; a
    symbol does anywhere. quote: a marker between two of which a string stands as it is. is_python: a value stands
    between a call's parentheses.

    What the end of the output leaves open is closed, unless the output was cut.
    """

    reader: Reader
    sink: Callable[[str], None]
    ends: tuple[str, ...] = ()
    quote: str = ""
    is_python: bool = False
    _levels: list[_Level] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first_of_ends = "".join({end[0] for end in self.ends})

    def value(self) -> Step[bool]:
        """Reads one value. Returns False if none follows; then only the content of brackets is taken."""
        reader, levels = self.reader, self._levels
        awaits_value = True
        while True:
            if levels:
                self._space((yield from reader.skip_space()))
            character = yield from reader.peek()
            if not character or (yield from self.ends_here(character)):
                break
            if awaits_value:
                if character in _CLOSING or character == ",":
                    if not levels:
                        return False
                    self.sink("null")
                    is_whole = True
                else:
                    is_whole = yield from self._begin_value(character)
                awaits_value = False
                if is_whole and not levels:
                    return True
                if is_whole:
                    levels[-1].has_items = True
            elif character == ",":
                yield from reader.take()
                levels[-1].held = levels[-1].held or ","
            elif character in _CLOSING:
                yield from reader.take()
                if self._closed_by(character):
                    return True
            else:
                self._begin_item()
                if (yield from self._items()):
                    continue
                awaits_value = levels[-1].closing != "}" or (yield from self._key())
        return self._finish(awaits_value=awaits_value)

    def text(self) -> Step[str | None]:
        """Reads and decodes a complete string; returns None if none follows. Nothing goes to `sink`."""
        held: list[str] = []
        character = yield from self.reader.peek()
        if not character or character not in _QUOTES:
            return None
        yield from self.reader.take()
        is_whole = yield from LenientJson(self.reader, held.append)._string(character, is_key=True)
        return str(json.loads("".join(held))) if is_whole else None

    def ends_here(self, character: str) -> Step[bool]:
        """Returns whether an end of the value follows, whose first character is `character`."""
        if is_symbol(character) and not (self.quote and self.quote[0] == character):
            return True
        if character not in self._first_of_ends:
            return False
        return (yield from self.reader.any_follows(self.ends))

    # ---- items ----

    def _space(self, space: str) -> None:
        level = self._levels[-1]
        space = _NOT_JSON_SPACE.sub(" ", space) if space else ""
        if level.held:
            level.held += space
        elif space:
            self.sink(space)

    def _begin_item(self) -> None:
        level = self._levels[-1]
        held = level.held or ", "
        self.sink(held if level.has_items else held.lstrip(", "))
        level.held = ""

    def _items(self) -> Step[bool]:
        """Reads many items of a list at once."""
        level = self._levels[-1]
        items = (yield from self.reader.run(_ITEMS)) if level.closing != "}" else ""
        if items:
            place = items.rindex(",")
            self.sink(items[:place])
            level.held, level.has_items = items[place:], True
        return bool(items)

    def _closed_by(self, character: str) -> bool:
        """Closes the bracket and whatever is open within it. Returns whether the value is complete."""
        levels = self._levels
        if all(level.closing != character for level in levels):
            return False
        while True:
            level = levels.pop()
            self.sink(level.held[1:] + level.shown)
            if levels:
                levels[-1].has_items = True
            if level.closing == character:
                return not levels

    def _finish(self, *, awaits_value: bool) -> bool:
        if self.reader.ended_by_cut or not self._levels:
            return bool(self._levels)
        if awaits_value and self._levels[-1].closing == "}":
            self.sink("null")
        while self._levels:
            self.sink(self._levels.pop().shown)
        return True

    def _key(self) -> Step[bool]:
        """Reads a key and its colon; returns False if there is no colon."""
        reader, character = self.reader, (yield from self.reader.peek())
        if self.quote and (yield from reader.match(self.quote)):
            yield from self._string(self.quote, is_key=True)
        elif character in _QUOTES:
            yield from reader.take()
            yield from self._string(character, is_key=True)
        else:
            word = yield from self._run(":=,}])\n")
            if reader.ended_by_cut:
                self.sink('"' + _escaped(word.strip()))
                return True
            self.sink(json.dumps(word.strip(), ensure_ascii=False))
        self._space((yield from reader.skip_space()))
        if (yield from reader.match(":")) or (yield from reader.match("=")):
            self.sink(":")
            return True
        if not reader.ended_by_cut:
            self.sink(":")
        if not (yield from reader.peek()):
            return True
        self.sink(" null")
        self._levels[-1].has_items = True
        return False

    def _run(self, stops: str) -> Step[str]:
        """Reads the text up to one of `stops`, a symbol or an end."""
        parts, plain = [], _outside(stops + self._first_of_ends)
        while True:
            while more := (yield from self.reader.run(plain)):
                parts.append(more)
            character = yield from self.reader.peek()
            if not character or character in stops or is_symbol(character) or (yield from self.ends_here(character)):
                return "".join(parts)
            parts.append((yield from self.reader.take()))

    # ---- values ----

    def _begin_value(self, character: str) -> Step[bool]:
        """Begins a value. Returns whether it is complete, which it is not where a bracket opens."""
        reader = self.reader
        if character in _PAIRS and len(self._levels) < _MAX_DEPTH:
            yield from reader.take()
            self._levels.append(_Level(*_PAIRS[character]))
            self.sink("{" if character == "{" else "[")
            return False
        if self.quote and (yield from reader.match(self.quote)):
            yield from self._string(self.quote)
        elif character in _QUOTES:
            yield from reader.take()
            yield from self._string(character)
        else:
            yield from self._word()
        return True

    def _word(self) -> Step[None]:
        """Reads a number or a word; anything else becomes a string."""
        reader, depth = self.reader, 0
        word = yield from reader.run(_DIGITS)
        character = yield from reader.peek()
        if word and character and character in ",]}" and _INTEGER.fullmatch(word):
            self.sink(word)
            return
        is_inner = bool(self._levels) or self.is_python
        stops = f",{_CLOSING}\n" + ("" if is_inner else " \t\r")
        first = ""
        if not word:
            first = yield from reader.take()  # even a bracket that is too deep
            first = "" if is_symbol(first) else first
        while True:
            word += first + (yield from self._run(stops + ("(" + _QUOTES if self.is_python else "")))
            first = ""
            character = yield from reader.peek()
            if not self.is_python or not character or (yield from self.ends_here(character)):
                break
            if character in _QUOTES and word.strip().lower() in _PREFIXES:
                yield from reader.take()
                yield from self._string(character, is_raw="r" in word.lower())
                return
            if character not in "(" + _QUOTES and not (depth and character in ",)"):
                break
            depth += {"(": 1, ")": -1}.get(character, 0)
            first = yield from reader.take()
        bare = word.rstrip()
        self.sink(bare if reader.ended_by_cut else word_as_json(bare))
        if self._levels:
            self._space(word[len(bare) :])

    def _string(self, quote: str, *, is_key: bool = False, is_raw: bool = False) -> Step[bool]:
        """Reads a string after its opening quote. Returns whether the closing quote was found."""
        reader, sink = self.reader, self.sink
        is_marker = quote not in _QUOTES
        sink('"')
        if not is_marker and not is_key and (yield from reader.match(quote * 2)):
            quote *= 3
        plain = _outside(quote[0]) if is_marker else _outside("\"'\\\n\r\t") if is_raw else _PLAIN[quote[0]]
        while True:
            while more := (yield from reader.run(plain)):
                sink(_escaped(more) if is_marker or is_raw else more)
            character = yield from reader.peek()
            if character and character == quote[0] and (yield from reader.match(quote)):
                if len(quote) > 1 or is_marker or is_key:
                    sink('"')
                    return True
                if (yield from self._closes(quote)):
                    return True
            elif not character or is_symbol(character):
                if not reader.ended_by_cut:
                    sink('"')
                return False
            elif character == "\\" and not is_marker and not is_raw:
                yield from reader.take()
                yield from self._escape(quote)
            else:
                sink(_escaped((yield from reader.take())))

    def _closes(self, quote: str) -> Step[bool]:
        """Returns whether the quote just taken ends its string: what comes after it may follow a value."""
        space = yield from self.reader.skip_space()
        character = yield from self.reader.peek()
        closes = (
            not character or character in f",:{_CLOSING}{_QUOTES}" or "\n" in space or bool(space and not self._levels)
        )
        if not closes and not (yield from self.ends_here(character)):
            self.sink(_escaped(quote + space))
            return False
        self.sink('"')
        if self._levels:
            self._space(space)
        return True

    def _escape(self, quote: str) -> Step[None]:
        """Reads an escape after its backslash."""
        reader = self.reader
        is_python = self.is_python or quote[0] == "'"
        character = yield from reader.peek()
        if character and character in '"\\bfnrt/' and not (is_python and character == "/"):
            self.sink("\\" + (yield from reader.take()))
        elif character == "'":
            self.sink((yield from reader.take()))
        elif character == "u" or (character == "x" and is_python):
            yield from reader.take()
            count = 4 if character == "u" else 2
            digits = yield from self._hex(count)
            if len(digits) == count:
                yield from self._code(digits.rjust(4, "0"))
            elif not reader.ended_by_cut:
                self.sink(f"\\\\{character}{digits}")
        elif not reader.ended_by_cut:
            self.sink("\\\\")

    def _hex(self, count: int) -> Step[str]:
        digits = ""
        while len(digits) < count and (yield from self.reader.peek()) in _HEX:
            digits += yield from self.reader.take()
        return digits

    def _code(self, digits: str) -> Step[None]:
        """Reads a \\u escape; half a character becomes U+FFFD."""
        code = int(digits, 16)
        while 0xD800 <= code < 0xDC00 and (yield from self.reader.match("\\u")):
            low = yield from self._hex(4)
            if self.reader.ended_by_cut:
                return
            if len(low) < 4:
                self.sink(f"{_REPLACEMENT}\\\\u{low}")
                return
            if 0xDC00 <= int(low, 16) < 0xE000:
                self.sink(f"\\u{digits}\\u{low}")
                return
            self.sink(_REPLACEMENT)
            digits, code = low, int(low, 16)
        self.sink(_REPLACEMENT if 0xD800 <= code < 0xE000 else f"\\u{digits}")


def word_as_json(word: str) -> str:
    """Returns a number or a word of JSON or Python as JSON; anything else, or a number beyond floats, as a string."""
    if word in _WORDS:
        return _WORDS[word]
    if len(word) <= _MAX_NUMBER_CHARS:
        if _NUMBER.fullmatch(word) and math.isfinite(float(word)):
            return word
        if _PYTHON_NUMBER.fullmatch(word):
            number: float | str
            try:
                number = int(word, 0)
            except ValueError:
                number = float(word) if "." in word else word
            if not isinstance(number, float) or math.isfinite(number):
                return json.dumps(number)
    return json.dumps(word, ensure_ascii=False)


def repaired(text: str) -> str | None:
    """Returns strict JSON of a text that is one value; None if it is none, or goes on after it."""
    reader, held = Reader(), list[str]()
    reader.feed(text.strip())
    reader.end()
    try:
        next(LenientJson(reader, held.append).value())
    except StopIteration as done:
        return "".join(held) if done.value and reader.ended else None
    raise RuntimeError("a text that has ended was waited for")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
