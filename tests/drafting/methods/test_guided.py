"""Lookups under a grammar: each token is allowed, forced text is drafted whole, the model's own spelling first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode

TARGET = Path(__file__).parents[3] / "models" / "demo-target"
TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
END = 0
SPEC = SessionSpec("s", 1, (0,), (), SamplingParams(), SpeculationMode.EXACT, 0)
CALL = 'start: "<tool_call>{\\"name\\": \\"open\\", \\"arguments\\": {\\"mode\\": \\"" /[rw]/ "\\"}}</tool_call>"'
FORCED = '<tool_call>{"name": "open", "arguments": {"mode": "'


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(TARGET), TOKENIZER.get_vocab_size(), [END])


def ngram() -> DraftMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)


def suffix() -> DraftMethod:
    return SuffixMethod(SuffixSettings(24, 100, 10_000, 4.0, 0.0))


def encoded(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


class Asked:
    """One session of one method; `prompt` and output as token ids."""

    def __init__(self, method: DraftMethod, compiler: GrammarCompiler, prompt: Sequence[int], grammar: str) -> None:
        self.method = method
        self.state = compiler.compile(Grammar(GrammarKind.LARK, grammar))
        spec = replace(SPEC, prompt_token_ids=tuple(prompt))
        self.session = DraftSession(spec, list(prompt), lambda _reply: None, grammar=self.state.twin())
        method.open(self.session)

    def draft(self, output: Sequence[int], num_tokens: int) -> list[int]:
        self.session.report(DraftStep(1, 0, tuple(output), num_tokens))
        (proposal,) = self.method.propose([self.session])
        assert proposal.base_len == len(output)
        return list(proposal.token_ids)


@pytest.mark.parametrize("make", [ngram, suffix])
def test_a_call_that_stands_nowhere_yet_is_drafted(compiler: GrammarCompiler, make: type[DraftMethod]) -> None:
    """Up to where the grammar leaves a choice, and again from there on."""
    asked = Asked(make(), compiler, encoded("Open it."), CALL)
    head = asked.draft([], 32)
    assert TOKENIZER.decode(head) == FORCED
    assert asked.draft([], 5) == head[:5]
    rest = asked.draft([*head, *encoded("w")], 32)
    assert TOKENIZER.decode(rest) == '"}}</tool_call>'
    assert rest[-1] == END


@pytest.mark.parametrize("make", [ngram, suffix])
def test_of_two_spellings_the_models_own_is_drafted(compiler: GrammarCompiler, make: type[DraftMethod]) -> None:
    grammar = 'start: ("[open]")*'
    letter_by_letter = [token for letter in "[open]" for token in encoded(letter)]
    asked = Asked(make(), compiler, encoded("It."), grammar)
    assert asked.draft([], 3) != letter_by_letter[:3]
    assert asked.draft([*letter_by_letter, *letter_by_letter[:1]], 4) == letter_by_letter[1:5]


@pytest.mark.parametrize("make", [ngram, suffix])
def test_a_lookup_goes_on_behind_what_is_forced(compiler: GrammarCompiler, make: type[DraftMethod]) -> None:
    """The prompt has what follows the key; the grammar has the key."""
    grammar = 'start: "{\\"colour\\": \\"" /[a-z ]+/ "\\"}"'
    asked = Asked(make(), compiler, encoded('{"size": 3} "colour": "dark blue"'), grammar)
    assert TOKENIZER.decode(asked.draft([], 32)).startswith('{"colour": "dark')


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([CALL, 'start: /[ab ]{0,9}/ "<x>" /[ab]*/', 'start: ("aa" | "ab" | "b")*', 'start: "a"']),
    st.text("ab <x>", max_size=30),
    st.lists(st.floats(0, 0.999), max_size=8),
    st.sampled_from([ngram, suffix]),
)
def test_every_draft_token_is_allowed(
    compiler: GrammarCompiler, grammar: str, prompt: str, choices: list[float], make: type[DraftMethod]
) -> None:
    asked = Asked(make(), compiler, encoded(prompt) or [END], grammar)
    output: list[int] = []
    for choice in choices:  # any output that the grammar allows
        allowed = [int(token) for token in asked.state.allowed(output).nonzero()[0] if token != END]
        if not allowed:
            break
        output.append(allowed[int(choice * len(allowed))])
    draft = asked.draft(output, 6)
    for place, token in enumerate(draft):
        assert asked.state.allowed([*output, *draft[:place]])[token]
    # What is left undrafted is a choice between two texts, or the end.
    if len(draft) < 6 and END not in draft:
        follow = [int(token) for token in asked.state.allowed([*output, *draft]).nonzero()[0]]
        texts = sorted((TOKENIZER.decode([token], skip_special_tokens=False) for token in follow), key=len)
        assert not follow or not all(texts[-1].startswith(text) for text in texts)
