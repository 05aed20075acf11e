"""Pieces of Lark, as llguidance reads it, for text in front of a marker, for markers, callers' grammars and strings.

A special token stands as `<[id]>`: no text can spell it, so where a marker begins is exact at every token of a draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.shared.sampling_params import REMARK, Grammar, GrammarKind

# Any text but special tokens.
ANY_TEXT = "/(?s:.*)/"
# Contents of a regex class that matches where Python's str.isspace is true.
_SPACE_CLASS = "\\s\\x1c-\\x1f"

# choices of an anyOf; each is a lexeme of its own
_MAX_CHOICES = 16
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>\"{}|\\^`]+",
}


class Lark:
    """Collects rules. token_ids: per special token's text, its id."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._longest_first = sorted(token_ids, key=len, reverse=True)
        self._rules: list[str] = []
        self._remark = ""

    def about(self, place: str) -> None:
        """Rules from here on end with a comment that names their part of the request, by which errors name it."""
        # A caller's name of an argument may have line breaks, and what follows one would be a rule.
        self._remark = f" {REMARK}{' '.join(place.splitlines())}" if place else ""

    def rule(self, expression: str, attributes: str = "") -> str:
        """Adds a rule and returns its name. Empty lines of an expression stay out: none can be read as another rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}{self._remark}")
        return name

    def terminal(self, expression: str) -> str:
        """Adds a terminal and returns its name. expression: regexes, which & and ~ may join."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}{self._remark}")
        return name

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def marker(self, text: str) -> str:
        """Returns the expression for the text, its special tokens as tokens; "" for none."""
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in self._pieces(text))

    def text_until(self, marker: str, text: str = ANY_TEXT) -> str:
        """Returns the expression for text up to the first marker, and the marker. text: a regex."""
        first, *rest = self._pieces(marker)
        if isinstance(first, int):
            return f"{self.rule(text)} {self.marker(marker)}"
        if not rest:
            return self.rule(text, f"[suffix={quoted(first)}]")
        # The text in front of the token must be of one lexeme with what comes before it.
        head = f"{text[:-1]}{regex_escaped(first)}/"
        return f"{self.rule(head)} {self.marker(marker.removeprefix(first))}"

    def fitting_until(self, marker: str, regexes: Sequence[str], *, before: str = "", after: str = "") -> str:
        """Returns the expression for text that fits all the regexes, and the marker. before, after: optional text
        outside of it.
        """
        first = self._pieces(marker)[0]
        without = [f"(?s:.*){regex_escaped(first)}(?s:.*)"] if isinstance(first, str) else []
        without += [f"{regex_escaped(before)}(?s:.*)"] if before else []
        without += [f"(?s:.*){regex_escaped(after)}"] if after else []
        text = self.terminal(" & ".join((*regexes, *(f"~/{one}/" for one in without))))
        whole = f"{_optional(before)} {text} {_optional(after)}"
        if isinstance(first, int):
            return f"{self.terminal(whole)} {self.marker(marker)}"
        return f"{self.terminal(f'{whole} {quoted(first)}')} {self.marker(marker.removeprefix(first))}"

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
    """Returns a regex of any text but special tokens that does not begin with `beginning`, where a space stands for any
    whitespace and whitespace may come before it.
    """
    rest, after = "", reversed(f" {beginning}"[:-1])
    for character, before in zip(reversed(beginning), after, strict=True):
        if character == " ":
            rest = f"[{_SPACE_CLASS}]*{rest}"
            continue
        other = f"[^{_SPACE_CLASS if before == ' ' else ''}{character}](?s:.*)"
        rest = f"({other}|{regex_escaped(character)}{rest})?" if rest else f"({other})?"
    return f"/[{_SPACE_CLASS}]*{rest}/"


def _optional(text: str) -> str:
    return f"{quoted(text)}?" if text else ""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Any) -> str:
    """%json with the schema. A per cent sign is escaped: no directive can be read out of a caller's strings."""
    return "%json " + json.dumps(schema).replace("%", "\\u0025")


def expression_of(grammar: Grammar) -> str:
    """Returns a caller's grammar as one expression."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return json_value({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return json_value(grammar.json_schema())
        case GrammarKind.CHOICE:
            return " | ".join(map(quoted, grammar.choices()))
        case GrammarKind.REGEX:
            return f"/{regex_literal(grammar.text)}/"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.text}\n}}"


def regex_literal(pattern: str) -> str:
    """Escapes slashes and line breaks of a pattern that will stand between slashes."""
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
    escaped = (f"\\{character}" if character in "\\/.*+?()[]{}|^$" else character for character in text)
    return "".join(escaped).replace("\n", "\\n")


# ---- strings that stand without quotes ----


@dataclass
class StringRules:
    """The rules of a string. It is one of `choices`, or fits all regexes of one entry of `regexes`. beyond: constraints
    that are not enforced.
    """

    choices: list[str] = field(default_factory=list)
    regexes: list[tuple[str, ...]] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)


def string_rules(schema: Any, resolved: Callable[[Any], Any]) -> StringRules | None:
    """Returns the rules of a schema for strings; None if it allows anything else. resolved: follows its references."""
    found = StringRules()
    schema = resolved(schema)
    branches = schema["anyOf"] if isinstance(schema, dict) and schema.keys() == {"anyOf"} else [schema]
    if len(branches) > _MAX_CHOICES:
        return None
    for branch in map(resolved, branches):
        if not isinstance(branch, dict) or not _is_string(branch):
            return None
        _add(found, branch)
    return found


def _is_string(schema: dict[str, Any]) -> bool:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return bool(values) and all(isinstance(value, str) for value in values)
    return schema.get("type") in ("string", ["string"])


def _add(found: StringRules, schema: dict[str, Any]) -> None:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    rest = schema.keys() - {"type", "enum", "const", "minLength", "maxLength"}
    if values is not None:
        fitting = [value for value in values if len(value) >= least and (most is None or len(value) <= most)]
        found.choices += fitting or values
        found.beyond += sorted(rest) + ([] if fitting else ["length"])
        return
    regexes = [f"/(?s:.{{{int(least)},{'' if most is None else int(most)}}})/"] if least or most is not None else []
    for key in sorted(rest):
        regex = _FORMATS.get(schema[key]) if key == "format" else _searched(schema[key]) if key == "pattern" else None
        if regex is None:
            found.beyond.append(f"{key} {str(schema[key])[:40]}")
        else:
            regexes.append(f"/{regex_literal(regex)}/")
    found.regexes.append(tuple(regexes))


def _searched(pattern: str) -> str | None:
    """Returns a pattern for the whole text from one that may match anywhere in it; None if it has anchors within."""
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    bare = inner.replace("\\\\", "").replace("\\^", "").replace("\\$", "").replace("[^", "")
    if "^" in bare or "$" in bare or ((begins or ends) and "|" in _outside_groups(bare)):
        return None
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _outside_groups(pattern: str) -> str:
    depth, found = 0, ""
    for character in pattern:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        found += character if depth == 0 else ""
    return found
