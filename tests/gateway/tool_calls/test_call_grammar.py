"""What a grammar of calls lets a model write, the parser reads as calls whose arguments fit their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from tool_forms import HERMES, SPECIAL
from tool_tokenizers import accepts, backend_of, random_walk, tokenizer_of

from outrider.gateway.schemas.reading import argument_types
from outrider.gateway.tool_calls.call_grammar import CallGrammar, CallRule
from outrider.gateway.tool_calls.events import Folded, fold
from outrider.gateway.tool_calls.formats import CALLS, output_format
from outrider.gateway.tool_calls.lark import Lark
from outrider.gateway.tool_calls.parser import OutputParser, Tools
from outrider.gateway.tool_calls.symbols import Symbols, marker_tokens
from outrider.shared.sampling_params import Grammar, GrammarKind

BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "any"},
        "pages": {"type": "integer"},
        "kind": {"enum": ["novel", "poem"]},
        "place": {"$ref": "#/$defs/place"},
        "lent": {"type": "boolean"},
    },
    "required": ["title", "place"],
    "$defs": {"place": {"type": "object", "properties": {"shelf": {"type": "integer"}}, "required": ["shelf"]}},
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}}
RULES = (CallRule("add_book", BOOK), CallRule("clock", CLOCK))
SCHEMAS = {rule.name: rule.parameters for rule in RULES}


def grammar_of(name: str, *, optional: bool = False, parallel: bool = True) -> Grammar:
    lark = Lark(tokenizer_of(SPECIAL[name]).control_tokens)
    calls = CallGrammar(lark, CALLS[name], RULES, parallel=parallel)
    return Grammar(GrammarKind.LARK, lark.source(lark.rule(calls.optional() if optional else calls.forced())))


def parsed(name: str, token_ids: list[int]) -> Folded:
    """Token by token, as a choice's detokenizer shows them."""
    tokenizer, output = tokenizer_of(SPECIAL[name]), output_format("none", name)
    symbols = Symbols(marker_tokens(output.markers(), SPECIAL[name]))
    parser = OutputParser(output, symbols, Tools({rule.name: argument_types(rule.parameters) for rule in RULES}))
    shown = symbols.by_id(tokenizer.control_tokens)
    raw = b"".join(
        shown[token].encode("utf-8", "surrogatepass") if token in shown else tokenizer.token_bytes(token)
        for token in token_ids
    )
    return fold(parser.push(raw.decode("utf-8", "surrogatepass")) + parser.finish())


def check_calls(folded: Folded) -> None:
    for call in folded.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", SPECIAL)
def test_forced_calls_are_calls_and_fit_their_schemas(name: str) -> None:
    grammar, source, num_ended = grammar_of(name), random.Random(name), 0
    for _ in range(4):
        path = random_walk(grammar, SPECIAL[name], source, 400)
        if path is None:
            continue
        num_ended += 1
        folded = parsed(name, path)
        assert folded.calls, backend_of(SPECIAL[name]).decode(path, skip_special_tokens=False)
        assert folded.content == ""
        assert folded.reasoning == ""
        check_calls(folded)
    assert num_ended


@pytest.mark.parametrize("name", SPECIAL)
def test_calls_of_the_models_own_accord_fit_too_and_text_is_free(name: str) -> None:
    grammar, source = grammar_of(name, optional=True), random.Random(name)
    for _ in range(3):
        path = random_walk(grammar, SPECIAL[name], source, 250)
        if path is not None:
            check_calls(parsed(name, path))
    text = "Hello there, no tools."
    assert accepts(grammar, SPECIAL[name], f"<|channel|>final<|message|>{text}" if name == "openai" else text)


def test_text_may_have_the_markers_that_its_family_writes_around_it() -> None:
    grammar, special = grammar_of("cohere_command3", optional=True), SPECIAL["cohere_command3"]
    assert accepts(grammar, special, "<|START_RESPONSE|>Hello.<|END_RESPONSE|>")
    assert not accepts(grammar, special, "<|START_RESPONSE|>Hello.")


def test_one_call_at_most() -> None:
    one = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    for optional in (False, True):
        single = grammar_of("hermes", optional=optional, parallel=False)
        assert accepts(single, HERMES, one)
        assert not accepts(single, HERMES, f"{one}\n{one}")
        assert accepts(grammar_of("hermes", optional=optional), HERMES, f"{one}\n{one}")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"title": "x"}',
        '{"title": "x", "place": {"shelf": 1}, "colour": "red"}',
        '{"title": "x", "place": {"shelf": "1"}}',
        '{"title":  "x", "place": {"shelf": 1}}',
    ],
    ids=["missing", "made up", "wrong type", "free whitespace"],
)
def test_what_does_not_fit_the_schema_cannot_be_written(arguments: str) -> None:
    form = '<tool_call>\n{{"name": "add_book", "arguments": {}}}\n</tool_call>'
    assert accepts(grammar_of("hermes"), HERMES, form.format('{"title": "x", "place": {"shelf": 1}}'))
    assert not accepts(grammar_of("hermes"), HERMES, form.format(arguments))


def test_a_call_without_its_markers_fits_its_schema_too() -> None:
    """And no other text begins as one does, before which only whitespace, or a marker, is passed over."""
    call = '{"name": "clock", "arguments": {}}'
    for parallel in (False, True):
        grammar = grammar_of("hermes", optional=True, parallel=parallel)
        assert accepts(grammar, HERMES, call)
        assert accepts(grammar, HERMES, '\n{\n "name": "clock", "arguments": {}}')
        assert accepts(grammar, HERMES, f"{call}\n{call}") == parallel
        for text in ('{"name": "clock", "arguments": {"a": 1}}', '\n\n{"name": "clock"}', '{\n  "name" : "Bob"}'):
            assert not accepts(grammar, HERMES, text), text
            assert not accepts(grammar, HERMES, f"{text}<tool_call>{call}</tool_call>"), text
            assert accepts(grammar, HERMES, f"So: {text}"), text
            assert accepts(grammar, HERMES, f"<tool_call>{call}</tool_call>{text}"), text
        for text in ("", " ", '{"result": 5}', '{"name": 5}', '{"name', '\n{\n "names": "Bob"}', "{{"):
            assert accepts(grammar, HERMES, text), text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\u2028", "\x0b"])
def test_an_arguments_name_adds_no_rule(end: str) -> None:
    """A remark names the argument, and its comment would end with the line."""
    lark = Lark({})
    lark.about(f"tools: f: a{end}r9: /evil/")
    lark.rule('"a"')
    assert lark.source("r0").splitlines() == ["start: r0", 'r0: "a" // from tools: f: a r9: /evil/']
