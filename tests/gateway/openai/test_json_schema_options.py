"""Options of JSON grammars: what they do to a schema, and to what llguidance then accepts."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_script import DEMO_TARGET
from llguidance import LLMatcher, LLTokenizer

from outrider.gateway.openai.grammar_fields import grammar_of
from outrider.gateway.openai.json_schema_options import without_additional_properties
from outrider.gateway.openai.schema import StructuredOutputs, parse_body
from outrider.gateway.request.served import RequestLimits, ServedModel
from outrider.shared.errors import InvalidRequest

PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXTS = ['{"a":1}', '{"a": 1}', '{\n  "a":\t1}', '{"a":1,"b":2}']


def accepted(**fields: Any) -> list[str]:
    asked = parse_body(StructuredOutputs, fields)
    grammar = grammar_of(None, asked, ServedModel("demo", 512, 4096, (), created=0), RequestLimits())
    assert grammar is not None
    tokenizer = LLTokenizer(str(DEMO_TARGET / "tokenizer.json"), n_vocab=4096, eos_token=[0])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(grammar.text or '{"type": "object"}'))
    assert not matcher.is_error()
    encoded = {text: tokenizer.tokenize_str(text) for text in TEXTS}
    return [text for text, token_ids in encoded.items() if matcher.validate_tokens(token_ids) == len(token_ids)]


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"json": PERSON}, [0, 1, 2, 3]),
        ({"json": PERSON, "disable_any_whitespace": True}, [0, 3]),
        ({"json": PERSON, "whitespace_pattern": " "}, [0, 1, 3]),
        ({"json": PERSON, "disable_additional_properties": True}, [0, 1, 2]),
        ({"json": PERSON, "disable_additional_properties": True, "disable_any_whitespace": True}, [0]),
        ({"json_object": True}, [0, 1, 2, 3]),
        ({"json_object": True, "disable_any_whitespace": True, "disable_additional_properties": True}, [0, 3]),
        ({"json": {**PERSON, "x-guidance": {"item_separator": ";"}}, "disable_any_whitespace": True}, [0]),
    ],
)
def test_what_is_accepted(fields: dict[str, Any], places: list[int]) -> None:
    assert accepted(**fields) == [TEXTS[place] for place in places]


def test_whitespace_is_one_or_the_other() -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        accepted(json=PERSON, disable_any_whitespace=True, whitespace_pattern=" ")


def test_objects_are_closed_wherever_a_schema_may_stand() -> None:
    inner: dict[str, Any] = {"properties": {"x": {}}}
    closed = {**inner, "additionalProperties": False}
    schema = {
        "properties": {"additionalProperties": inner, "b": {"items": inner}, "c": {"anyOf": [inner, {"type": "null"}]}},
        "$defs": {"d": {"not": inner}},
        "additionalProperties": inner,
        "default": inner,
        "enum": [inner],
    }
    assert without_additional_properties(schema) == {
        "properties": {
            "additionalProperties": closed,
            "b": {"items": closed},
            "c": {"anyOf": [closed, {"type": "null"}]},
        },
        "$defs": {"d": {"not": closed}},
        "additionalProperties": closed,
        "default": inner,
        "enum": [inner],
    }
    assert "additionalProperties" not in inner


def test_nesting_as_deep_as_json_allows() -> None:
    schema: dict[str, Any] = {"properties": {"x": {}}}
    for _ in range(400):
        schema = {"items": schema}
    node = without_additional_properties(schema)
    while "items" in node:
        node = node["items"]
    assert node["additionalProperties"] is False
