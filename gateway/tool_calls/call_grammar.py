"""Grammars for calls: a model that must call, or whose calls must follow their schemas, writes its family's form.

What may come before is free: reasoning (reasoning.py), and text where the calls are optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.tool_calls.formats import Body, CallFormat
from outrider.gateway.tool_calls.lark import ANY_TEXT, Lark, json_value, quoted, regex_escaped, text_without
from outrider.gateway.tool_calls.schemas import closed, is_only_string, lifted, properties_of

# As json.dumps writes, which templates show to the model; free whitespace lets a model write it without end.
_JSON_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_SPACE = "/[ \\n]{0,2}/"


@dataclass(frozen=True)
class CallRule:
    """A tool that may be called. parameters: the schema that its arguments follow."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


class CallGrammar:
    """Adds the rules of one row's calls to `lark`."""

    def __init__(self, lark: Lark, row: CallFormat, tools: Sequence[CallRule], *, parallel: bool) -> None:
        self._lark = lark
        self._row = row
        self._tools = tools
        self._parallel = parallel and row.body is not Body.HARMONY
        self._space = lark.rule(_SPACE)

    def forced(self) -> str:
        """At least one call, and nothing else."""
        row = self._row
        calls = self._calls()
        return calls if row.bare else f"{self._lark.marker(self._trigger())} {calls}"

    def optional(self) -> str:
        """Text with calls in it, or none."""
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
        """Calls without markers, or text in which none is read."""
        text = text_without(self._row.unmarked)
        begun = f"{self._lark.text_until(self._trigger(), text)} {calls}"
        one = self._lark.rule(" | ".join(self._unmarked(tool) for tool in self._tools))
        unmarked = f"{one}+" if self._parallel else one
        return f"{unmarked} | {self._lark.rule(text)} | {begun} {more if self._parallel else self._lark.rule(ANY_TEXT)}"

    def _unmarked(self, tool: CallRule) -> str:
        """Its beginning is one lexeme: the longest wins, and text may share all but its last character."""
        spaces = _SPACE[1:-1]
        begin = self._lark.rule(f"/{spaces}{regex_escaped(self._row.unmarked).replace(' ', spaces)}/")
        named = quoted(f'{tool.name}", "{self._row.arguments_key}": ')
        return f'{begin} {named} {self._json(tool.parameters)} "}}"'

    def _framed_text(self) -> str:
        """Text between the markers that some families put around an answer; optional."""
        if not self._row.framing:
            return ""
        begin, end = map(self._lark.marker, self._row.framing)
        return f"({begin} {self._lark.rule(ANY_TEXT)} {end} {self._space})?"

    def _trigger(self) -> str:
        return self._row.section[0] or self._row.begin

    def _calls(self) -> str:
        """What follows the trigger: all calls, and the end."""
        row, marker, space = self._row, self._lark.marker, self._space
        one = self._lark.rule(" | ".join(self._call(tool) for tool in self._tools))
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
                return f"{opened} {self._json(tool.parameters)} {space} {fence}"
            case Body.TAGGED:
                return self._tagged(tool)
            case Body.PYTHONIC:
                return f'{quoted(tool.name + "(")} {self._listed(tool, self._assigned)} ")"'
            case Body.GEMMA:
                return f'{quoted(f"{row.head}{tool.name}")} "{{" {self._listed(tool, self._keyed)} "}}"'
            case Body.HARMONY:
                header = marker(f"commentary to=functions.{tool.name} <|constrain|>json<|message|>")
                return f"{header} {self._json(tool.parameters)}"

    def _json(self, schema: dict[str, Any]) -> str:
        return self._lark.rule(json_value({**closed(schema), **_JSON_STYLE}))

    def _object(self, tool: CallRule) -> str:
        row, parameters = self._row, closed(tool.parameters)
        inner = {key: value for key, value in parameters.items() if key not in ("$defs", "definitions")}
        properties = {row.name_key: {"const": tool.name}, row.arguments_key: inner}
        if row.id_key:
            properties = {row.id_key: {"type": "string", "pattern": "^[0-9]{1,4}$"}, **properties}
        wrap = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return self._lark.rule(json_value({**lifted(parameters, wrap), **_JSON_STYLE}))

    def _arguments(self, tool: CallRule) -> list[tuple[str, dict[str, Any], bool]]:
        """Name, schema and whether it is required, in the order of the schema."""
        required = tool.parameters.get("required")
        names = required if isinstance(required, list) else []
        found = []
        for name, schema in properties_of(tool.parameters).items():
            own = lifted(tool.parameters, schema if isinstance(schema, dict) else {})
            found.append((name, own, name in names))
        return found

    def _tagged(self, tool: CallRule) -> str:
        row, marker, space = self._row, self._lark.marker, self._space
        parts = [f"{quoted(tool.name)} {marker(row.separator)} {space}"]
        for name, schema, required in self._arguments(tool):
            is_string = is_only_string(schema)
            key_end = next((text for text, kind in row.key_ends if kind in (None, is_string)), "")
            key = f"{marker(row.key_begin)} {quoted(name)} {marker(key_end)}"
            opened = f"{key} {space} {marker(row.value_begin)}" if row.value_begin else key
            part = f"{opened} {self._tagged_value(schema, is_string=is_string)} {space}"
            parts.append(part if required else f"({part})?")
        return " ".join(parts)

    def _tagged_value(self, schema: dict[str, Any], *, is_string: bool) -> str:
        row, marker = self._row, self._lark.marker
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not is_string:
            return f"{self._space} {self._json(schema)} {self._space} {marker(row.value_end)}"
        if isinstance(choices, list):
            return f"{self._space} ({' | '.join(map(quoted, choices))}) {self._space} {marker(row.value_end)}"
        return self._lark.text_until(row.value_end)

    def _listed(self, tool: CallRule, argument: Any) -> str:
        """Arguments with commas between them, the required ones first, so that no comma stands alone."""
        arguments = self._arguments(tool)
        required = [argument(name, schema) for name, schema, needed in arguments if needed]
        optional = [argument(name, schema) for name, schema, needed in arguments if not needed]
        separator = '"," ' + self._space
        if required:
            rest = "".join(f" ({separator} {part})?" for part in optional)
            return f" {separator} ".join(required) + rest
        expression = ""
        for place, part in enumerate(optional):
            rest = "".join(f" ({separator} {other})?" for other in optional[place + 1 :])
            expression += (" | " if expression else "") + f"{part}{rest}"
        return f"({expression})?" if expression else ""

    def _assigned(self, name: str, schema: dict[str, Any]) -> str:
        return f"{quoted(name + '=')} {self._json(schema)}"

    def _keyed(self, name: str, schema: dict[str, Any]) -> str:
        if not is_only_string(schema):
            return f"{quoted(name + ':')} {self._json(schema)}"
        quote = self._lark.marker(self._row.value_begin)
        choices = schema.get("enum")
        text = " | ".join(map(quoted, choices)) if isinstance(choices, list) else ""
        value = f"({text}) {quote}" if text else self._lark.text_until(self._row.value_begin)
        return f"{quoted(name + ':')} {quote} {value}"
