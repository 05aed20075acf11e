"""Grammars for calls: a model that must call, or whose calls must follow their schemas, writes its family's form.

What may come before is free: reasoning (reasoning.py), and text where the calls are optional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.schemas.keywords import Schema
from outrider.gateway.schemas.reading import Reading, ToolObject, reading_of
from outrider.gateway.tool_calls.formats import Body, CallFormat
from outrider.gateway.tool_calls.lark import (
    ANY_TEXT,
    Lark,
    json_value,
    quoted,
    regex_escaped,
    string_rules,
    text_without,
)
from outrider.shared.errors import InvalidRequest

# A name that no schema gives: what may stand in all forms' places for names.
_KEY = "/[a-zA-Z0-9_.-]{1,64}/"
# The style of json.dumps, which templates show to the model; with free whitespace a model could write it without end.
_JSON_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_SPACE = "/[ \\n]{0,2}/"


@dataclass(frozen=True)
class CallRule:
    """A tool that may be called. parameters: the schema that its arguments follow."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


class CallGrammar:
    """Adds the rules of one row's calls to `lark`. beyond: what no grammar of theirs holds, and the tool's name."""

    def __init__(self, lark: Lark, row: CallFormat, tools: Sequence[CallRule], *, parallel: bool) -> None:
        """Raises InvalidRequest, which names the tool whose schema cannot be read."""
        self._lark = lark
        self._row = row
        self._tools = tools
        self._parallel = parallel and row.body is not Body.HARMONY
        self._space = lark.rule(_SPACE)
        self._readings = {tool.name: _reading(tool) for tool in tools}
        self.beyond = [(tool.name, what) for tool in tools for what in self._readings[tool.name].beyond]

    def forced(self) -> str:
        """Returns the expression for at least one call, and nothing else."""
        row = self._row
        calls = self._calls()
        return calls if row.bare else f"{self._lark.marker(self._trigger())} {calls}"

    def optional(self) -> str:
        """Returns the expression for text with or without calls in it."""
        if self._row.body is Body.HARMONY:
            marker, text = self._lark.marker, self._lark.rule(ANY_TEXT)
            return f"{marker('<|channel|>')} ({self._calls()} | {marker('final<|message|>')} {text})"
        until, text = self._lark.text_until(self._trigger()), self._lark.rule(ANY_TEXT)
        calls = self._calls()
        if self._row.bare:
            text = self._lark.rule("/([^{\\[ \\t\\r\\n](?s:.*))?/")
            return f"{calls} | {text} | {until} {calls}"
        more = f"({until} {calls}){'*' if self._parallel else '?'} {text}"
        return f"{self._framed_text()} {more}" if not self._row.unmarked else self._or_unmarked(calls, more)

    def _or_unmarked(self, calls: str, more: str) -> str:
        """Returns the expression for calls without markers, or for text in which none is read."""
        text = text_without(self._row.unmarked)
        begun = f"{self._lark.text_until(self._trigger(), text)} {calls}"
        written = " | ".join(self._unmarked(tool) for tool in self._tools)
        self._lark.about("")
        one = self._lark.rule(written)
        unmarked = f"{one}+" if self._parallel else one
        return f"{unmarked} | {self._lark.rule(text)} | {begun} {more if self._parallel else self._lark.rule(ANY_TEXT)}"

    def _unmarked(self, tool: CallRule) -> str:
        """Returns the expression for a call without a marker. Its beginning is one lexeme: the longest wins, and text
        may share all but its last character.
        """
        spaces = _SPACE[1:-1]
        begin = self._lark.rule(f"/{spaces}{regex_escaped(self._row.unmarked).replace(' ', spaces)}/")
        named = quoted(f'{tool.name}", "{self._row.arguments_key}": ')
        return f'{begin} {named} {self._parameters(tool)} "}}"'

    def _framed_text(self) -> str:
        """Returns the expression for optional text between the markers that some families put around an answer."""
        if not self._row.framing:
            return ""
        begin, end = map(self._lark.marker, self._row.framing)
        return f"({begin} {self._lark.rule(ANY_TEXT)} {end} {self._space})?"

    def _trigger(self) -> str:
        return self._row.section[0] or self._row.begin

    def _calls(self) -> str:
        """Returns the rule for what follows the trigger: all calls, and the end."""
        row, marker, space = self._row, self._lark.marker, self._space
        calls = " | ".join(self._call(tool) for tool in self._tools)
        self._lark.about("")
        one = self._lark.rule(calls)
        end = f"{space} {marker(row.end)}" if row.end else ""
        if row.body in (Body.ARRAY, Body.PYTHONIC):
            more = f' ("," {space} {one})*' if self._parallel else ""
            return self._lark.rule(f'{space} "[" {one}{more} "]" {end}')
        first = f"{space} {one} {end}"
        if not row.section[0]:
            more = f"({space} {marker(row.begin)} {first})*" if self._parallel and not row.bare else ""
            return self._lark.rule(f"{first} {more}")
        section_begin, section_end = map(marker, row.section)
        begin = marker(row.begin)
        whole = f"{space} {begin} {first}"
        if not self._parallel:
            return self._lark.rule(f"{whole} {space} {section_end}")
        if row.section_each:
            return self._lark.rule(
                f"{whole} {space} {section_end} ({space} {section_begin} {whole} {space} {section_end})*"
            )
        return self._lark.rule(f"({whole})+ {space} {section_end}")

    def _call(self, tool: CallRule) -> str:
        row, marker, space = self._row, self._lark.marker, self._space
        match row.body:
            case Body.OBJECT | Body.ARRAY:
                return self._object(tool)
            case Body.NAMED:
                name = f"functions.{tool.name}:" if row.numbered_names else tool.name
                number = self._lark.rule("/[0-9]{1,4}/") if row.numbered_names else ""
                opened = f"{marker(row.head)} {quoted(name)} {number} {space} {marker(row.separator)} {space}"
                fence = '"```"' if row.separator.startswith("```") else ""
                return f"{opened} {self._parameters(tool)} {space} {fence}"
            case Body.TAGGED:
                return self._tagged(tool)
            case Body.PYTHONIC:
                return f'{quoted(tool.name + "(")} {self._listed(tool, self._assigned)} ")"'
            case Body.GEMMA:
                return f'{quoted(f"{row.head}{tool.name}")} "{{" {self._listed(tool, self._keyed)} "}}"'
            case Body.HARMONY:
                header = marker(f"commentary to=functions.{tool.name} <|constrain|>json<|message|>")
                return f"{header} {self._parameters(tool)}"

    def _json(self, reading: Reading, schema: Any) -> str:
        return self._lark.rule(json_value({**reading.with_definitions(schema), **_JSON_STYLE}))

    def _about(self, tool: CallRule, argument: str = "") -> None:
        self._lark.about(f"tools: {tool.name}{f': {argument}' if argument else ''}")

    def _parameters(self, tool: CallRule) -> str:
        self._about(tool)
        reading = self._readings[tool.name]
        return self._json(reading, reading.schema)

    def _object(self, tool: CallRule) -> str:
        self._about(tool)
        row, reading = self._row, self._readings[tool.name]
        properties: Schema = {row.name_key: {"const": tool.name}, row.arguments_key: reading.schema}
        if row.id_key:
            properties = {row.id_key: {"type": "string", "pattern": "^[0-9]{1,4}$"}, **properties}
        wrap = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return self._json(reading, wrap)

    # ---- forms that write each argument apart ----

    def _objects(self, tool: CallRule) -> tuple[ToolObject, ...]:
        reading = self._readings[tool.name]
        if reading.objects is not None:
            for key in ("patternProperties", "minProperties", "maxProperties"):
                if key in reading.schema:
                    self.beyond.append((tool.name, f"the schema: {key}"))
            return reading.objects
        self.beyond.append((tool.name, "the schema: its parts together"))
        return (ToolObject(reading.types, frozenset(), True),)

    def _tagged(self, tool: CallRule) -> str:
        row, marker, space = self._row, self._lark.marker, self._space
        key_ends = {kind: text for text, kind in row.key_ends}

        def argument(name: str, value: str, *, is_string: bool) -> str:
            key = f"{marker(row.key_begin)} {name} {marker(key_ends.get(is_string, key_ends.get(None, '')))}"
            return f"{key} {f'{space} {marker(row.value_begin)}' if row.value_begin else ''} {value} {space}"

        choices = []
        for one in self._objects(tool):
            parts = []
            for name, schema in one.properties.items():
                part = self._tagged_argument(tool, quoted(name), schema, argument)
                parts.append(part if name in one.required else f"({part})?")
            if one.others is not None:
                parts.append(f"({self._tagged_argument(tool, self._other_key(one), one.others, argument)})*")
            choices.append(" ".join(parts))
        return f"{quoted(tool.name)} {marker(row.separator)} {space} ({' | '.join(choices)})"

    def _tagged_argument(self, tool: CallRule, name: str, schema: Any, argument: Callable[..., str]) -> str:
        self._about(tool, name)
        row, space, reading = self._row, self._space, self._readings[tool.name]
        end = self._lark.marker(row.value_end)
        strings = self._strings(tool, name, schema)
        if strings is None:
            return argument(name, f"{space} {self._json(reading, schema)} {space} {end}", is_string=False)
        choices, regexes = strings
        before, after = "" if row.value_begin else '"\\n"?', '"\\n"?'  # what the parser does not take for the value's
        values = [f"{before} ({' | '.join(map(quoted, choices))}) {after} {end}"] if choices else []
        values += [
            self._lark.fitting_until(row.value_end, one, before="" if row.value_begin else "\n", after="\n")
            if one
            else self._lark.text_until(row.value_end)
            for one in regexes
        ]
        return argument(name, f"({' | '.join(values)})", is_string=True)

    def _other_key(self, one: ToolObject) -> str:
        """Returns a terminal for a name that is none of the object's own."""
        own = "|".join(map(regex_escaped, one.properties))
        return self._lark.terminal(f"{_KEY} & ~/{own}/" if own else _KEY)

    def _strings(self, tool: CallRule, name: str, schema: Any) -> tuple[list[str], list[tuple[str, ...]]] | None:
        """Returns the choices and regexes of StringRules; None: the value may be more than a string."""
        reading = self._readings[tool.name]
        found = string_rules(schema, reading.resolved)
        if found is None:
            return None
        self.beyond += [(tool.name, f"{name}: {what}") for what in found.beyond]
        return found.choices, found.regexes

    def _listed(self, tool: CallRule, argument: Any) -> str:
        """Returns the expression for arguments between commas, required ones first, so that no comma stands alone."""
        return f"({' | '.join(self._list_of(tool, one, argument) for one in self._objects(tool))})"

    def _list_of(self, tool: CallRule, one: ToolObject, argument: Any) -> str:
        required = [
            argument(tool, quoted(name), schema) for name, schema in one.properties.items() if name in one.required
        ]
        optional = [
            argument(tool, quoted(name), schema) for name, schema in one.properties.items() if name not in one.required
        ]
        separator = '"," ' + self._space
        more = ""
        if one.others is not None:
            other = argument(tool, self._other_key(one), one.others)
            more = f" ({separator} {other})*"
        if required:
            return f" {separator} ".join(required) + "".join(f" ({separator} {part})?" for part in optional) + more
        # Each optional one may be the first: what follows it is one rule, which it shares with those before it.
        firsts, rest = [f"{other}{more}"] if more else [], more
        for part in reversed(optional):
            part = self._lark.rule(part)
            firsts.append(f"{part}{rest}")
            rest = " " + self._lark.rule(f"({separator} {part})?{rest}")
        return f"({' | '.join(reversed(firsts))})?" if firsts else ""

    def _assigned(self, tool: CallRule, name: str, schema: Any) -> str:
        self._about(tool, name)
        return f'{name} "=" {self._json(self._readings[tool.name], schema)}'

    def _keyed(self, tool: CallRule, name: str, schema: Any) -> str:
        self._about(tool, name)
        strings = self._strings(tool, name, schema)
        if strings is None:
            return f'{name} ":" {self._json(self._readings[tool.name], schema)}'
        quote = self._row.value_begin
        choices, regexes = strings
        values = [f"({' | '.join(map(quoted, choices))}) {self._lark.marker(quote)}"] if choices else []
        values += [self._lark.fitting_until(quote, one) if one else self._lark.text_until(quote) for one in regexes]
        return f'{name} ":" {self._lark.marker(quote)} ({" | ".join(values)})'


def _reading(tool: CallRule) -> Reading:
    try:
        return reading_of(tool.parameters)
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: {tool.name}: {error.message}", param="tools") from None
