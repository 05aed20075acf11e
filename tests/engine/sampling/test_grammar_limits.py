"""Grammars that must not stop the engine's thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind

TARGET = Path(__file__).parents[3] / "models/demo-target"
_RUN = """
import sys
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.sampling_params import Grammar, GrammarKind
state = GrammarCompiler(sys.argv[1], 4096, [0]).compile(Grammar(GrammarKind.LARK, sys.argv[2]))
print(int(state.allowed([]).sum()))
"""


@pytest.mark.parametrize(
    "text", ["start: /b+//b+/", "start: a a\na: /b+/", "start: /b+/ /b+/ /c/", 'root ::= b b\nb ::= "b"+']
)
def test_forced_bytes_without_end_do_not_hang(text: str) -> None:
    """In a process of its own: what hangs, hangs in compiled code that no exception reaches."""
    command = [sys.executable, "-c", _RUN, str(TARGET), text]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert int(found.stdout) >= 1


def test_a_path_beyond_the_limits_is_no_end_and_spoils_no_other_path() -> None:
    """A draft may lead to a state that llguidance gives up on, from which its matcher does not come back."""
    tokenizer = LLTokenizer(str(TARGET / "tokenizer.json"), n_vocab=4096, eos_token=[0])
    rules = 'start: "a" | "b" hard hard hard\nhard: c c | c\nc: d | d d\nd: "x" | "x" "y"'
    source = LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + rules)
    limited = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(step_max_items=20))
    state = GrammarState(limited, 4096, lambda _token_id: b"")
    [easy], [hard] = tokenizer.tokenize_str("a"), tokenizer.tokenize_str("b")
    before = state.allowed([]).copy()
    assert before[[easy, hard]].all()
    with pytest.raises(InvalidRequest, match="Too many items"):
        state.allowed([hard])
    assert (state.allowed([]) == before).all()
    assert np.flatnonzero(state.allowed([easy])).tolist() == [0]


def accepts(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer(str(TARGET / "tokenizer.json"), n_vocab=4096, eos_token=[0])
    state = GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.LARK, grammar))
    token_ids = [*tokenizer.tokenize_str(text), 0]
    return all(state.allowed(token_ids[:place])[token_id] for place, token_id in enumerate(token_ids))


# The same language in llama.cpp's notation, which vLLM's documentation shows, and in Lark's.
GBNF = """
root ::= "SELECT " column " from " table (" where " condition)?  # a comment
column ::= "col_1" | "col_2"
table ::= [a-z]+ "_" [0-9]{1,2}
condition ::= column "= " ("1" | "2")
"""
LARK = """
start: "SELECT " column " from " table (" where " condition)?
column: "col_1" | "col_2"
table: /[a-z]+_[0-9]{1,2}/
condition: column "= " ("1" | "2")
"""


@pytest.mark.parametrize(
    "text",
    [
        *("SELECT col_1 from users_07", "SELECT col_2 from t_1 where col_1= 2"),
        *("SELECT col_3 from t_1", "SELECT col_1 from t_123", "SELECT col_1 from t_1 where col_1= 3", ""),
    ],
)
def test_gbnf_is_the_language_of_the_same_lark_grammar(text: str) -> None:
    assert accepts(GBNF, text) == accepts(LARK, text) == text.endswith(("users_07", "col_1= 2"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(("root ::= [", ""), ('a ::= "b"', "No 'root' rule"), ("root ::= b", "Rule 'b' not found")),
        ("root ::= " + "(" * 5000, "it is nested too deeply"),
    ],
)
def test_broken_gbnf_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"as GBNF: {said}"):
        GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.LARK, text))


def test_an_error_shows_no_line_of_a_grammar_that_was_made_of_tools() -> None:
    text = 'start: "secret" call\ncall: %json {"type": "array", "uniqueItems": true}'
    with pytest.raises(InvalidRequest, match=r'Unimplemented keys: \["uniqueItems"\]$'):
        GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.LARK, text))


def test_options_are_not_the_requests_to_set() -> None:
    text = 'start: "a"\n%llguidance {"no_forcing": false}'
    with pytest.raises(InvalidRequest, match="%llguidance is not allowed"):
        GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.LARK, text))


@pytest.mark.parametrize("text", ["0", "[]", '["a", 1]', "{", "[" * 100_000])
def test_choices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="choice"):
        GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.CHOICE, text))
