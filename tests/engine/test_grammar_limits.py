"""Grammars that must not stop the engine's thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.grammar import GrammarCompiler
from shared.errors import InvalidRequest
from shared.sampling_params import Grammar, GrammarKind

TARGET = Path(__file__).parents[2] / "models/demo-target"
_RUN = """
import sys
from engine.grammar import GrammarCompiler
from shared.sampling_params import Grammar, GrammarKind
state = GrammarCompiler(sys.argv[1], 4096, [0]).compile(Grammar(GrammarKind.LARK, sys.argv[2]))
print(int(state.allowed([]).sum()))
"""


@pytest.mark.parametrize("text", ["start: /b+//b+/", "start: a a\na: /b+/", "start: /b+/ /b+/ /c/"])
def test_forced_bytes_without_end_do_not_hang(text: str) -> None:
    """In a process of its own: what hangs, hangs in compiled code that no exception reaches."""
    command = [sys.executable, "-c", _RUN, str(TARGET), text]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert int(found.stdout) >= 1


def test_options_are_not_the_requests_to_set() -> None:
    text = 'start: "a"\n%llguidance {"no_forcing": false}'
    with pytest.raises(InvalidRequest, match="%llguidance is not allowed"):
        GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.LARK, text))


@pytest.mark.parametrize("text", ["0", "[]", '["a", 1]', "{", "[" * 100_000])
def test_choices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="choice"):
        GrammarCompiler(str(TARGET), 4096, [0]).compile(Grammar(GrammarKind.CHOICE, text))
