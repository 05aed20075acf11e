"""The account of a prediction: drafts at once, at the length that the costs support, and what a wrong one costs."""

from __future__ import annotations

import random

import pytest

from outrider.verifier_service.draft_length.prediction import CostsOfPredictions, PredictionCosts, PredictionLength

# Milliseconds of a forward by rows: Qwen2.5-Coder-0.5B, packed, two cores.
FORWARDS = {1: 11.4, 2: 11.6, 4: 13.5, 6: 15.9, 8: 21.6, 16: 45.0, 33: 95.0}


def forward_ms(num_rows: float) -> float:
    (below, low), (above, high) = next(
        ((a, FORWARDS[a]), (b, FORWARDS[b])) for a, b in zip(FORWARDS, [*FORWARDS][1:], strict=False) if num_rows <= b
    )
    return low + (high - low) * (num_rows - below) / (above - below)


COSTS = PredictionCosts(11.4, [forward_ms(1 + length) - 11.4 for length in range(33)])


def decode(accepts: list[int], most: int = 32) -> float:
    """Rate relative to plain decoding. accepts: predicted tokens that are right before each deviation from the text,
    after which three plain rounds find it again.
    """
    length, spent_ms, num_tokens = PredictionLength(), 0.0, 0
    for right in accepts:
        followed = 2
        while True:
            asked = length.choose(followed, most, COSTS)
            accepted = min(asked, right)
            spent_ms += COSTS.plain_s + COSTS.of(asked)
            num_tokens += accepted + 1
            if asked:
                length.observe(followed, asked, accepted, COSTS)
            right, followed = right - accepted - 1, followed + accepted + 1
            if right < 0:
                break
        spent_ms += 3 * COSTS.plain_s
        num_tokens += 3
    return num_tokens * COSTS.plain_s / spent_ms


def test_it_drafts_at_once_and_longer_once_confirmed() -> None:
    length = PredictionLength()
    first = length.choose(0, 32, COSTS)
    assert first >= 3
    cheap = PredictionCosts(1.0, [0.01 * length for length in range(33)])
    for followed in range(0, 300, 10):
        length.observe(followed, 10, 10, cheap)
    assert length.choose(300, 32, cheap) == 32, "where rows are cheap, as on a GPU"
    assert length.choose(300, 7, cheap) == 7


def test_a_right_edit_reaches_what_the_forwards_allow() -> None:
    """Four times plain decoding and more; the table's limit is 4.3."""
    assert decode([1000]) > 4.1
    assert decode([200] * 5) > 3.9


@pytest.mark.parametrize("right", [0, 1, 2])
def test_a_wrong_prediction_costs_under_three_percent(right: int) -> None:
    """Phrases of it come again and again, and nothing follows them."""
    assert decode([right] * (1000 // (right + 4))) > 0.97


def test_no_sequence_of_outcomes_costs_more() -> None:
    """Also one that is right until drafts are long, and then wrong."""
    rng = random.Random(0)
    for _ in range(200):
        assert decode([rng.choice((0, 0, 1, 3, 9, 40)) for _ in range(100)]) > 0.97
    length, loss = PredictionLength(), 0.0
    for _ in range(1000):  # always wrong, and always after a match that is long enough to be tried
        asked = length.choose(64, 32, COSTS)
        loss += COSTS.of(asked) / COSTS.plain_s
        if asked:
            length.observe(64, asked, 0, COSTS)
    assert loss / (1000 * 33) < 0.02


def test_without_credit_it_waits_for_a_long_match() -> None:
    length = PredictionLength()
    while length.credit_rounds > 0.0:
        length.observe(2, 5, 0, COSTS)
    assert length.choose(31, 32, COSTS) == 0
    for _ in range(40):
        length.observe(64, 5, 5, COSTS)
    assert length.choose(2, 32, COSTS) > 0


def test_costs_are_shared_by_the_sessions_of_a_forward() -> None:
    costs = CostsOfPredictions(lambda rows: 10.0 + rows, lambda sessions, mean: sessions * mean)
    alone, two_of_four = costs.of(1, 1, 0.0, 100.0), costs.of(4, 2, 0.0, 100.0)
    assert (alone.plain_s, alone.of(3), alone.of(99)) == (11.0, 3.0, 32.0)
    assert (two_of_four.plain_s, two_of_four.of(3)) == (3.5, 3.0)
    assert len(CostsOfPredictions(lambda rows: 10.0, lambda sessions, mean: mean).of(1, 1, 12.0, 15.0).drafts_s) == 4
