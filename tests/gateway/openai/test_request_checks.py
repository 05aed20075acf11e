"""Checks that both servers share: grammars within bounds, methods whose drafters are away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.gateway.openai.checks import check_grammar, check_speculation
from outrider.gateway.request.served import RequestLimits, ServedModel
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation

MODEL = ServedModel("m", max_model_len=100, vocab_size=50)


def test_any_known_method_may_be_named_before_a_drafter_is_seen() -> None:
    assert check_speculation(Speculation(method="draft_model"), MODEL).method == "draft_model"
    with pytest.raises(InvalidRequest, match="crystal_ball"):
        check_speculation(Speculation(method="crystal_ball"), MODEL)


def test_only_those_that_were_seen_afterwards() -> None:
    model = replace(MODEL, draft_methods=("ngram",))
    assert check_speculation(Speculation(method="ngram"), model).method == "ngram"
    with pytest.raises(InvalidRequest, match="draft_model"):
        check_speculation(Speculation(method="draft_model"), model)


def test_a_grammar_has_a_longest() -> None:
    limits = RequestLimits(max_grammar_chars=5)
    check_grammar("a" * 5, MODEL, limits, "grammar")
    with pytest.raises(InvalidRequest, match="the maximum is 5"):
        check_grammar("a" * 6, MODEL, limits, "grammar")
    with pytest.raises(InvalidRequest, match="not supported"):
        check_grammar("a", replace(MODEL, supports_grammars=False), limits, "grammar")
