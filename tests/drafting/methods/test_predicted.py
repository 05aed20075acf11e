"""Predicted drafts in front of a method: what comes from where, under a grammar, after failures and withdrawals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.predicted import PredictedMethod
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

PREDICTED = tuple(range(100, 140))
SPEC = SessionSpec("s", 1, (7, 8, 9, 7, 8), (), SamplingParams(), SpeculationMode.REJECTION, 0, method="ngram")


class Rounds:
    """Sessions of a verifier that says `text`, drafted for four tokens a round."""

    def __init__(self, text: Sequence[int], predicted: tuple[int, ...] = PREDICTED) -> None:
        spec = replace(SPEC, predicted_token_ids=predicted)
        self.text = list(text)
        self.session = DraftSession(spec, list(spec.prompt_token_ids), lambda _reply: None)
        self.method = PredictedMethod(NgramMethod(prompt_lookup_min=2, prompt_lookup_max=4))
        self.method.open(self.session)

    def draft(self, base_len: int, tokens: Sequence[int]) -> list[int]:
        self.session.report(DraftStep(1, base_len, tuple(tokens), 4))
        (proposal,) = self.method.propose([self.session])
        assert (proposal.base_len, proposal.method, proposal.laws) == (self.session.committed_len, "ngram", ())
        return list(proposal.token_ids)

    def all(self) -> list[int]:
        """Draft tokens that were wrong, per round, until the text has come."""
        wrong: list[int] = []
        length, new = 0, list[int]()
        while length < len(self.text):
            draft = self.draft(length - len(new), new)
            rest = self.text[length:]
            right = next((n for n, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
            wrong.append(max(0, min(len(draft), len(rest)) - right))
            new = rest[: right + 1]
            length += len(new)
        return wrong


def test_the_prediction_goes_first_and_the_method_where_it_is_left() -> None:
    rounds = Rounds([])
    assert rounds.draft(0, []) == [100, 101, 102, 103]
    assert rounds.draft(0, [7, 8]) == [7, 8, 7, 8]  # n-grams of the prompt
    assert rounds.draft(2, [120, 121]) == [122, 123, 124, 125]
    rounds.method.close(rounds.session)
    rounds.method.close(rounds.session)


def test_a_session_without_one_is_the_methods() -> None:
    rounds = Rounds([], predicted=())
    assert rounds.draft(0, []) == [9, 7, 8, 9]


def test_an_edit_costs_one_round_each() -> None:
    text = [1, *PREDICTED[:15], 5, 6, *PREDICTED[17:]]
    wrong = Rounds(text).all()
    assert len(wrong) <= len(text) / 5 + 2 * 4
    assert sum(map(bool, wrong)) <= 3


def test_a_wrong_prediction_is_left_alone_after_a_few_rounds() -> None:
    """Its pairs of tokens come again and again, and nothing of it follows."""
    text = [token for n in range(200) for token in (100 + n % 39, 101 + n % 39, 1000 + n)]
    rounds = Rounds(text)
    rounds.method = PredictedMethod(NgramMethod(prompt_lookup_min=90, prompt_lookup_max=90))  # finds nothing
    rounds.method.open(rounds.session)
    wrong = rounds.all()
    assert 0 < sum(wrong) <= 16
    assert not any(wrong[len(wrong) // 2 :])


def test_withdrawn_tokens_are_followed_anew() -> None:
    rounds = Rounds([])
    assert rounds.draft(0, PREDICTED[:20]) == [120, 121, 122, 123]
    assert rounds.draft(2, PREDICTED[2:5]) == [105, 106, 107, 108]
    assert rounds.draft(1, [5, *PREDICTED[30:33]]) == [133, 134, 135, 136]


class Grammar:
    """Allows even tokens, and forces 90 where only odd ones are predicted."""

    def allowed(self, path: Sequence[int]) -> Any:
        return [token % 2 == 0 for token in range(200)]

    def forced(self, path: Sequence[int]) -> int | None:
        return None


@pytest.mark.parametrize(("predicted", "draft"), [((100, 102, 103, 104), [100, 102]), ((101, 102), [])])
def test_a_grammar_cuts_it(predicted: tuple[int, ...], draft: list[int]) -> None:
    rounds = Rounds([], predicted)
    rounds.session.grammar = Grammar()  # type: ignore[assignment]
    assert rounds.draft(0, []) == draft
