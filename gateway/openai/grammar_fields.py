"""Turns response_format and structured_outputs into one Grammar. The engine checks whether it is valid."""

from __future__ import annotations

import json

from outrider.gateway.openai.checks import check_grammar
from outrider.gateway.openai.json_schema_options import with_whitespace, without_additional_properties
from outrider.gateway.openai.schema import ResponseFormat, StructuredOutputs
from outrider.gateway.request.served import RequestLimits, ServedModel
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind
from outrider.shared.strict_json import strict_json

_FORMATS = ("text", "json_object", "json_schema")


def grammar_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    model: ServedModel,
    limits: RequestLimits,
) -> Grammar | None:
    """Returns the output's grammar; None for unconstrained output. Raises InvalidRequest."""
    by_format = _from_response_format(response_format) if response_format is not None else None
    by_outputs = _from_structured_outputs(structured_outputs) if structured_outputs is not None else None
    if by_format is not None and by_outputs is not None:
        raise InvalidRequest("give response_format or structured_outputs, not both", param="structured_outputs")
    grammar = by_format or by_outputs
    if grammar is None:
        return None
    param = "response_format" if by_format is not None else "structured_outputs"
    check_grammar(grammar.text, model, limits, param)
    return grammar


def _from_response_format(response_format: ResponseFormat) -> Grammar | None:
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "json_schema":
            wrapper = response_format.json_schema
            schema = wrapper.get("schema") if wrapper is not None else None
            if not isinstance(schema, dict):
                raise InvalidRequest(
                    "response_format.json_schema.schema must be an object", param="response_format.json_schema"
                )
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        case other:
            raise InvalidRequest(
                f"response_format.type {other[:80]!r} is not one of {', '.join(_FORMATS)}",
                param="response_format.type",
            )


def _from_structured_outputs(asked: StructuredOutputs) -> Grammar:
    candidates = [
        _json_schema(asked.json_, asked) if asked.json_ is not None else None,
        _text(GrammarKind.REGEX, "regex", asked.regex),
        _choice(asked.choice) if asked.choice is not None else None,
        _text(GrammarKind.LARK, "grammar", asked.grammar),
        _json_schema({"type": "object"}, asked) if asked.json_object else None,
    ]
    given = [grammar for grammar in candidates if grammar is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, choice, grammar and json_object",
            param="structured_outputs",
        )
    return given[0]


def _json_schema(schema: object, asked: StructuredOutputs) -> Grammar:
    param = "structured_outputs.json"
    if isinstance(schema, str):
        schema = strict_json(schema, param, param)
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be an object or its JSON text", param=param)
    if asked.disable_additional_properties:
        schema = without_additional_properties(schema)
    schema = with_whitespace(schema, asked.disable_any_whitespace, asked.whitespace_pattern)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _text(kind: GrammarKind, name: str, text: str | None) -> Grammar | None:
    if text is None:
        return None
    if not text:
        raise InvalidRequest(f"structured_outputs.{name} must not be empty", param=f"structured_outputs.{name}")
    return Grammar(kind, text)


def _choice(choices: tuple[str, ...]) -> Grammar:
    if not choices or not all(choices):
        raise InvalidRequest("structured_outputs.choice must be non-empty strings", param="structured_outputs.choice")
    return Grammar(GrammarKind.CHOICE, json.dumps(choices))
