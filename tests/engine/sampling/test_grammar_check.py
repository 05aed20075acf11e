"""Grammars that take a compiler minutes or gigabytes are refused, and nobody but their sender notices."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.engine.sampling.grammar_check import GrammarCheck
from outrider.gateway.tool_calls.call_grammar import CallGrammar, CallRule
from outrider.gateway.tool_calls.formats import CALLS
from outrider.gateway.tool_calls.lark import Lark
from outrider.shared.errors import InvalidRequest, Overloaded
from outrider.shared.sampling_params import Grammar, GrammarKind

TARGET = Path(__file__).parents[3] / "models/demo-target"
# 8 s and 200 MB for llguidance 1.9 on a core of its own
BOMB = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1000003}')
PLAIN = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(TARGET), 4096, [0])


def _child_of(compiler: GrammarCompiler) -> int:
    child = compiler._check._child
    assert child is not None
    return child.pid


def test_a_bomb_is_refused_and_the_next_grammar_is_compiled(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=r"more than (1 s|64 MiB), the limit") as refused:
        compiler.compile(BOMB)
    assert refused.value.param == "grammar"
    assert "structured_outputs" in refused.value.message
    assert compiler.compile(PLAIN).allowed([]).any()


@pytest.mark.parametrize(("row", "others"), [("hermes", []), ("qwen3_coder", []), ("hermes", ["fine", "plain"])])
def test_a_bomb_in_a_tools_schema_names_the_tool(compiler: GrammarCompiler, row: str, others: list[str]) -> None:
    lark = Lark({})
    bomb = {"type": "object", "properties": {"n": json.loads(BOMB.text)}, "required": ["n"]}
    tools = [*(CallRule(name, {"type": "object"}) for name in others), CallRule("count_up", bomb)]
    calls = CallGrammar(lark, CALLS[row], tools, parallel=False)
    with pytest.raises(InvalidRequest, match=r"more than (1 s|64 MiB), the limit") as refused:
        compiler.compile(Grammar(GrammarKind.LARK, lark.source(lark.rule(calls.forced()))))
    assert refused.value.param == "tools"
    assert refused.value.message.startswith(f"tools: {', '.join([*others, 'count_up'])}: ")
    assert "response_format" not in refused.value.message


def test_what_is_known_needs_no_turn(compiler: GrammarCompiler) -> None:
    compiler.compile(PLAIN)
    with pytest.raises(InvalidRequest):
        compiler.compile(BOMB)
    with compiler._check.turn():  # whoever had to wait for it would wait for ever
        assert compiler.compile(PLAIN).allowed([]).any()
        with pytest.raises(InvalidRequest, match="the limit"):
            compiler.compile(BOMB)


def test_two_sessions_of_a_known_grammar_do_not_share_a_position(compiler: GrammarCompiler) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{2}")
    first, second = compiler.compile(digits), compiler.compile(digits)
    at_start = second.allowed([])
    digit = int(at_start.argmax())
    assert (first.allowed([digit]) != at_start).any()
    assert (second.allowed([]) == at_start).all()


def test_a_process_that_was_killed_is_started_again(compiler: GrammarCompiler) -> None:
    compiler.compile(PLAIN)
    os.kill(_child_of(compiler), signal.SIGKILL)
    assert compiler.compile(Grammar(GrammarKind.REGEX, "a+")).allowed([]).any()


def test_waiting_grammars_are_bounded() -> None:
    check = GrammarCheck(TARGET / "tokenizer.json", 4096, [0])
    for _ in range(8):
        check._room.acquire()
    with pytest.raises(Overloaded, match="try again later"), check.turn():
        pass


_PARENT = """
import os, signal, sys
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.sampling_params import Grammar, GrammarKind
compiler = GrammarCompiler(sys.argv[1], 4096, [0])
compiler.compile(Grammar(GrammarKind.REGEX, "a+"))
print(compiler._check._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_its_parent() -> None:
    parent = subprocess.run([sys.executable, "-c", _PARENT, str(TARGET)], capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    stat = Path(f"/proc/{int(parent.stdout)}/stat")
    deadline = time.monotonic() + 60.0
    while stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z":
        assert time.monotonic() < deadline, "the process is still there"
        time.sleep(0.02)


@pytest.mark.storm  # half a minute until the limit is reached
def test_rows_beyond_the_parsers_limits_end_the_session_with_the_reason(compiler: GrammarCompiler) -> None:
    """They allowed the end of the output alone, as if the grammar were fulfilled."""
    state = compiler.compile(Grammar(GrammarKind.LARK, 'start: s\ns: s s | s s s | "a"'))
    state._left_s = 1e9
    token = int(state.allowed([]).argmax())
    with pytest.raises(InvalidRequest, match=r"items; max is") as refused:
        state.allowed([token] * 1000)
    assert "<state>" not in refused.value.message


def test_a_grammar_that_takes_long_row_by_row_ends_its_session() -> None:
    """By the thread's own clock, which is given here: on the mean 5 ms a row, and 0.2 s once."""
    tokenizer = LLTokenizer(str(TARGET / "tokenizer.json"), n_vocab=4096, eos_token=[0])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("a*"), log_level=0)
    now = itertools.count(0.0, 0.024)
    state = GrammarState(matcher, 4096, lambda _token_id: b"", clock=lambda: next(now))
    [letter] = tokenizer.tokenize_str("a")
    for length in range(10):
        state.allowed([letter] * length)
    with pytest.raises(InvalidRequest, match="more than 5 ms to check") as refused:
        state.allowed([])
    assert refused.value.param == "grammar"


@pytest.mark.parametrize(
    ("row", "place"),
    [("hermes", "arguments.b.c: "), ("qwen3_coder", '"b": c: '), ("gemma4", '"b": c: '), ("deepseek_v31", "b.c: ")],
)
def test_a_schema_that_is_refused_is_named_by_tool_and_path(compiler: GrammarCompiler, row: str, place: str) -> None:
    inner = {"type": "object", "properties": {"c": {"type": "string", "pattern": "["}}, "required": ["c"]}
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": inner}, "required": ["a", "b"]}
    lark = Lark({})
    tools = [CallRule("fine", {"type": "object"}), CallRule("look_up", schema)]
    calls = CallGrammar(lark, CALLS[row], tools, parallel=True)
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(Grammar(GrammarKind.LARK, lark.source(lark.rule(calls.forced()))))
    assert refused.value.param == "tools"
    assert refused.value.message.startswith(f"tools: look_up: {place}")
    assert "unclosed character class" in refused.value.message
