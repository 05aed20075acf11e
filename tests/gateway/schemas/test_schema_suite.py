"""Every schema of the published test suite, in every form of a call: held, left out and said, or refused by name.

json_schema_suite.json is the suite of draft 2020-12 (github.com/json-schema-org/JSON-Schema-Test-Suite, MIT, its
licence beside it): per keyword, schemas with instances and whether they are valid.
`python -m pytest -s -k table tests/gateway/schemas/test_schema_suite.py` prints what became of each keyword.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing.exceptions
from tool_forms import SPECIAL
from tool_tokenizers import accepts, random_walk, tokenizer_of

from outrider.gateway.schemas.reading import argument_types
from outrider.gateway.tool_calls.call_grammar import CallGrammar, CallRule
from outrider.gateway.tool_calls.events import fold
from outrider.gateway.tool_calls.formats import CALLS, output_format
from outrider.gateway.tool_calls.lark import Lark
from outrider.gateway.tool_calls.parser import OutputParser, Tools
from outrider.gateway.tool_calls.symbols import Symbols, marker_tokens
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind

SUITE: dict[str, list[Any]] = json.loads(Path(__file__).with_name("json_schema_suite.json").read_text())
FORMS = ("hermes", "qwen3_coder", "gemma4", "lfm2")
# A number of which only its text can be passed on.
BEYOND_FLOATS = re.compile(rb"[0-9][eE]\+?[0-9]{3}|[0-9]{300}")
HELD, SAID, REFUSED = "held", "superset, said", "refused by name"


def moved(schema: Any) -> Any:
    """The schema as that of an argument: its references start at the root."""
    if isinstance(schema, list):
        return [moved(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: moved(value) for key, value in schema.items() if key != "$schema"}
    pointer = found.get("$ref")
    return (
        {**found, "$ref": f"#/properties/a{pointer[1:]}"} if isinstance(pointer, str) and pointer[0] == "#" else found
    )


def parameters_of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": moved(schema)}, "required": ["a"]}


def grammar_of(parameters: dict[str, Any], form: str) -> tuple[Grammar, list[tuple[str, str]]]:
    lark = Lark(tokenizer_of(SPECIAL[form]).control_tokens)
    calls = CallGrammar(lark, CALLS[form], [CallRule("f", parameters)], parallel=False)
    source = lark.source(lark.rule(calls.forced()))
    return Grammar(GrammarKind.LARK, source), calls.beyond


def arguments_of(parameters: dict[str, Any], form: str, token_ids: list[int]) -> Any:
    tokenizer, output = tokenizer_of(SPECIAL[form]), output_format("none", form)
    symbols = Symbols(marker_tokens(output.markers(), SPECIAL[form]))
    shown = symbols.by_id(tokenizer.control_tokens)
    raw = b"".join(
        shown[token].encode("utf-8", "surrogatepass") if token in shown else tokenizer.token_bytes(token)
        for token in token_ids
    )
    parser = OutputParser(output, symbols, Tools({"f": argument_types(parameters)}))
    folded = fold(parser.push(raw.decode("utf-8", "surrogatepass")) + parser.finish())
    (call,) = folded.calls
    return json.loads(call.arguments)


def is_valid(parameters: dict[str, Any], arguments: Any) -> bool | None:
    """None: the schema refers to a document that is not here."""
    try:
        return bool(jsonschema.Draft202012Validator(parameters).is_valid(arguments))
    except (referencing.exceptions.Unresolvable, RecursionError):
        return None


def outcome(schema: Any, instances: list[Any], form: str, num_walks: int) -> str:
    """What became of the schema. Fails where something is accepted that does not fit and nobody said so."""
    parameters = parameters_of(schema)
    try:
        grammar, beyond = grammar_of(parameters, form)
        paths = [random_walk(grammar, SPECIAL[form], random.Random(place), 90) for place in range(num_walks)]
    except InvalidRequest:
        return REFUSED
    for path in paths:
        if path is None or BEYOND_FLOATS.search(b"".join(map(tokenizer_of(SPECIAL[form]).token_bytes, path))):
            continue
        arguments = arguments_of(parameters, form, path)
        assert beyond or is_valid(parameters, arguments) in (True, None), f"{form} lets {arguments} through: {schema}"
    if form == "hermes" and not beyond:
        for instance, valid in instances:
            written = json.dumps({"name": "f", "arguments": {"a": instance}}, ensure_ascii=False)
            assert valid or not accepts(grammar, SPECIAL[form], f"<tool_call>\n{written}\n</tool_call>"), instance
    return SAID if beyond else HELD


@pytest.mark.parametrize("keyword", SUITE)
def test_what_a_grammar_accepts_fits_the_schema(keyword: str) -> None:
    for place, (_, schema, instances) in enumerate(SUITE[keyword]):
        outcome(schema, instances, FORMS[place % len(FORMS)], 1)


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_table_of_all_keywords_and_forms() -> None:
    """Prints what the table of docs/clients.md sums up: schemas per outcome, as a range where the forms differ."""
    print(f"\n| keyword | schemas | {HELD} | {SAID} | {REFUSED} |\n|---|---|---|---|---|")
    for keyword, groups in SUITE.items():
        counts = [Counter(outcome(schema, instances, form, 3) for _, schema, instances in groups) for form in FORMS]
        ranges = [sorted({count[kind] for count in counts}) for kind in (HELD, SAID, REFUSED)]
        cells = [" to ".join(dict.fromkeys((str(found[0]), str(found[-1])))) for found in ranges]
        print(f"| `{keyword}` | {len(groups)} | {' | '.join(cells)} |")
