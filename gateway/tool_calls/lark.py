"""Pieces of Lark, as llguidance reads it, for text in front of a marker, for markers and for callers' grammars.

A special token stands as `<[id]>`: no text can spell it, so where a marker begins is exact at every token of a draft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.shared.sampling_params import Grammar, GrammarKind

# Any text but special tokens.
ANY_TEXT = "/(?s:.*)/"
# What Python's str.isspace is true of, in a class of a regex.
_SPACE_CLASS = "\\s\\x1c-\\x1f"


class Lark:
    """Collects rules. token_ids: per special token's text, its id."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._longest_first = sorted(token_ids, key=len, reverse=True)
        self._rules: list[str] = []

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a new rule. Empty lines of an expression stay out of it: none can be read as another rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def marker(self, text: str) -> str:
        """The text, its special tokens as tokens; "" for none."""
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in self._pieces(text))

    def text_until(self, marker: str, text: str = ANY_TEXT) -> str:
        """text: a regex. The marker behind it ends it wherever it stands first."""
        first, *rest = self._pieces(marker)
        if isinstance(first, int):
            return f"{self.rule(text)} {self.marker(marker)}"
        if not rest:
            return self.rule(text, f"[suffix={quoted(first)}]")
        # The text in front of the token must be of one lexeme with what comes before it.
        head = f"{text[:-1]}{regex_escaped(first)}/"
        return f"{self.rule(head)} {self.marker(marker.removeprefix(first))}"

    def _pieces(self, text: str) -> list[str | int]:
        pieces: list[str | int] = [text] if text else []
        for token in self._longest_first:
            for place in range(len(pieces) - 1, -1, -1):
                piece = pieces[place]
                if isinstance(piece, str) and token in piece:
                    before, _, after = piece.partition(token)
                    parts: list[str | int] = [before, self._token_ids[token], *self._pieces(after)]
                    pieces[place : place + 1] = [part for part in parts if part != ""]
        return pieces


def text_without(beginning: str) -> str:
    """A regex of any text but special tokens that does not begin so, where a space stands for any whitespace and
    whitespace may be before it.
    """
    rest, after = "", reversed(f" {beginning}"[:-1])
    for character, before in zip(reversed(beginning), after, strict=True):
        if character == " ":
            rest = f"[{_SPACE_CLASS}]*{rest}"
            continue
        other = f"[^{_SPACE_CLASS if before == ' ' else ''}{character}](?s:.*)"
        rest = f"({other}|{regex_escaped(character)}{rest})?" if rest else f"({other})?"
    return f"/[{_SPACE_CLASS}]*{rest}/"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Any) -> str:
    """%json with the schema. A per cent sign is escaped: no directive can be read out of a caller's strings."""
    return "%json " + json.dumps(schema).replace("%", "\\u0025")


def expression_of(grammar: Grammar) -> str:
    """A caller's grammar as one expression."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return json_value({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return json_value(grammar.json_schema())
        case GrammarKind.CHOICE:
            return " | ".join(map(quoted, grammar.choices()))
        case GrammarKind.REGEX:
            return f"/{_regex_literal(grammar.text)}/"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.text}\n}}"


def _regex_literal(pattern: str) -> str:
    """The pattern between slashes: those inside are escaped, and so are line breaks."""
    written, is_escaped = "", False
    for character in pattern:
        if character == "/" and not is_escaped:
            written += "\\/"
        elif character == "\n":
            written += "n" if is_escaped else "\\n"
        else:
            written += character
        is_escaped = character == "\\" and not is_escaped
    return written


def regex_escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\/.*+?()[]{}|^$" else character for character in text)
