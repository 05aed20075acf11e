"""Rejection mode over every method's real proposals: verifier's engine, drafter's methods, the wire's bytes between.

A tiny random target of 13 tokens, so that the law of the first two tokens can be counted: against transformers' own
probabilities, by chi-square. What a broken rule looks like is in acceptance/test_mutants; here one mutant shows that
these counts are enough to see one.
"""

from __future__ import annotations

import numpy as np
import pytest

from outrider.drafting.growth import draft as growth
from tests.grid.heads import HEADS
from tests.grid.pools import Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.drafting.drafting_pair import NUM_SESSIONS, build_method, sample_two_tokens

pytestmark = pytest.mark.storm

TREES = ("draft_model", *HEADS, "draft_model+suffix", "dspark+suffix")


CASES = [(name, tree) for name in ("ngram", "suffix", *TREES) for tree in (False, True) if tree <= (name != "ngram")]


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_every_method_keeps_the_targets_law(pools: Pools, law_of_two: np.ndarray, name: str, tree: bool) -> None:
    counts, num_drafted, num_accepted = sample_two_tokens(
        pools, build_method(name, pools), tree, stream=CASES.index((name, tree))
    )
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


def test_drafts_ranked_instead_of_drawn_would_show(
    pools: Pools, law_of_two: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the likeliest tokens of the law are sent as if they had been drawn from it."""
    monkeypatch.setattr(growth, "draw_distinct", lambda law, count, _rng: list(law.token_ids[:count]))
    counts, _, _ = sample_two_tokens(pools, build_method("draft_model", pools), tree=False, stream=99)
    assert chi_square_p_value(counts, law_of_two) < SMALLEST_P_VALUE
