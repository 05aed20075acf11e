"""The n-grams that are replayed for the hybrid are those that are served."""

from __future__ import annotations

from models.make.hybrid_rounds import ngram_drafter
from outrider.training.replay import tokens_per_round

ROW = {"prompt_token_ids": [7, 8], "token_ids": [9, 7, 8, 9, 7, 8, 9, 5, 6]}


def test_ngrams_look_up_what_is_known_alone() -> None:
    """After 789: nothing. After 7897: 897, all right. After 78978978: 9, and 7, wrong. After the 5: nothing."""
    assert tokens_per_round([ROW], 3, ngram_drafter) == 8 / 4
