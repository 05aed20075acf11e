"""Schemas of parameters in one form: references, parts and what is left out; work and size in proportion."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from test_schema_suite import grammar_of
from tool_forms import SPECIAL
from tool_tokenizers import accepts

from outrider.gateway.schemas.reading import argument_types, reading_of
from outrider.shared.errors import InvalidRequest

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def takes(parameters: dict[str, Any], arguments: Any) -> bool:
    grammar, _ = grammar_of(parameters, "hermes")
    written = json.dumps({"name": "f", "arguments": arguments})
    return accepts(grammar, SPECIAL["hermes"], f"<tool_call>\n{written}\n</tool_call>")


@pytest.mark.parametrize(
    ("parameters", "fits", "does_not"),
    [
        (obj({"start": obj({"d": DIGIT}), "end": {"$ref": "#/properties/start"}}),
         {"start": {"d": 1}, "end": {"d": 2}}, {"start": {"d": 1}, "end": {}}),
        (obj({"a": {"allOf": [obj({"x": DIGIT}), obj({"y": DIGIT})]}}),
         {"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 2, "z": 3}}),
        ({**obj({"k": DIGIT}), "anyOf": [obj({"x": DIGIT}), obj({"y": DIGIT})]}, {"k": 1, "y": 2}, {"k": 1}),
        ({**obj({"a": DIGIT}), "required": ["a", "b"]}, {"a": 1, "b": "any"}, {"a": 1}),
        ({"properties": {"a": DIGIT}, "required": ["a"]}, {"a": 1}, 5),
        ({"anyOf": [obj({"x": DIGIT}), obj({"y": DIGIT})]}, {"y": 1}, {"x": 1, "y": 1}),
        (obj({"n": {"$ref": "#"}}) | {"required": []}, {"n": {"n": {}}}, {"n": {"m": {}}}),
        (obj({"a": {"$ref": "#/$defs/x~1y/anyOf/1"}}, **{"$defs": {"x/y": {"anyOf": [{}, DIGIT]}}}),
         {"a": 1}, {"a": "1"}),
        ({"type": "object", "additionalProperties": DIGIT}, {"any": 1}, {"any": "1"}),
        (obj({"enum": {"$ref": "#/$defs/d"}}, **{"$defs": {"d": DIGIT}}), {"enum": 1}, {"enum": "1"}),
        (obj({"a": {"allOf": [{"$ref": "#/$defs/o"}, {"required": ["y"]}]}},
             **{"$defs": {"o": {"type": "object", "properties": {"x": DIGIT, "y": DIGIT}}}}),
         {"a": {"y": 1}}, {"a": {"x": 1}}),
    ],
)  # fmt: skip
def test_what_the_form_means(parameters: dict[str, Any], fits: Any, does_not: Any) -> None:
    assert reading_of(parameters).beyond == ()
    assert takes(parameters, fits)
    assert not takes(parameters, does_not)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "array", "uniqueItems": True}, "a: uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, "a: propertyNames"),
        ({"not": {"type": "string"}}, "a: not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "a: if"),
        ({"type": "string", "format": "regex"}, "a: format regex"),
        ({"type": "string", "pattern": "^(?!x)y"}, "a: pattern ^(?!x)y"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "a.oneOf: several may hold"),
        ({"$ref": "http://example.com/schema"}, "a: $ref http://example.com/schema"),
        ({"$ref": "#/$defs/nowhere"}, "a: $ref #/$defs/nowhere"),
        ({"type": "object", "properties": 5}, "a: properties, of the wrong type"),
        ({"type": "object", "required": [{"$ref": "#"}]}, "a: required, of the wrong type"),
    ],
)
def test_what_no_grammar_holds_is_said(schema: dict[str, Any], what: str) -> None:
    parameters = obj({"a": schema})
    assert reading_of(parameters).beyond == (what,)
    grammar_of(parameters, "hermes")


@pytest.mark.parametrize("key", ["anyOf", "allOf", "oneOf"])
@pytest.mark.parametrize(
    "leaf", [DIGIT, obj({"x": DIGIT, "back": {"$ref": "#/$defs/d0"}})], ids=["scalar", "recursive"]
)
def test_chains_of_two_equal_references_take_no_time(key: str, leaf: dict[str, Any]) -> None:
    definitions = {f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": leaf}
    parameters = obj({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": definitions})
    started = time.process_time()
    reading = reading_of(parameters)
    argument_types(parameters)
    assert time.process_time() - started < 0.25
    assert len(json.dumps(reading.with_definitions(reading.schema))) < 20 * len(json.dumps(parameters))


@pytest.mark.parametrize("key", ["anyOf", "oneOf"])
def test_many_arguments_that_share_wide_references_take_no_time(key: str) -> None:
    wide: dict[str, Any] = {f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * 16} for n in range(8)}
    definitions = wide | {"d8": {"type": "string"}}
    started = time.process_time()
    reading_of(obj({f"a{n}": {"$ref": "#/$defs/d0"} for n in range(50)}, **{"$defs": definitions}))
    assert time.process_time() - started < 1


def test_recursive_parts_and_many_schemas_are_bounded() -> None:
    def node(name: str) -> dict[str, Any]:
        return obj({key: {"$ref": f"#/$defs/{name}"} for key in "abcd"})

    parameters = obj({"x": {"allOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}]}})
    started = time.process_time()
    for hostile in (
        {**parameters, "$defs": {"p": node("p"), "q": node("q")}},
        obj({str(n): DIGIT for n in range(9_000)}),
    ):
        with pytest.raises(InvalidRequest, match="has more than 5000 schemas"):
            reading_of(hostile)
        assert argument_types(hostile) == {}
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "parameters", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}]
)
def test_a_schema_that_is_itself_is_read(parameters: dict[str, Any]) -> None:
    assert argument_types(parameters) == {}


def test_types_of_arguments_follow_references() -> None:
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/s"}, "b": {"anyOf": [{"$ref": "#/$defs/s"}, {"type": "null"}]}, "c": {}},
        "$defs": {"s": {"type": "string"}},
        "anyOf": [{"properties": {"d": {"const": 1}}}],
    }
    types = {
        "a": {"type": ["string"]},
        "b": {"type": ["null", "string"]},
        "c": {},
        "d": {"type": ["integer", "number"]},
    }
    assert argument_types(parameters) == types


def test_parameters_are_an_object() -> None:
    with pytest.raises(InvalidRequest, match="parameters type must be object"):
        reading_of({"type": "string"})
