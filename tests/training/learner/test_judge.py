"""Which heads are tried out: those that are better by more than chance, and worse nowhere."""

from __future__ import annotations

import math
import random

import pytest
import torch

from outrider.training.heads.interface import DraftScores
from outrider.training.learner.judge import Lengths, Verdict, judge

_random = random.Random(5)
BEFORE = [Lengths(2.0 + _random.gauss(0, 0.3), 1.5 + _random.gauss(0, 0.2)) for _ in range(24)]
NOISE = [_random.gauss(0, 0.05) for _ in BEFORE]
IS_OLD = [place >= 12 for place in range(24)]


def changed(greedy: float, sampled: float, old: float = 0.0) -> list[Lengths]:
    return [
        Lengths(each.greedy * (1 + greedy + noise + old * is_old), each.sampled * (1 + sampled + noise + old * is_old))
        for each, noise, is_old in zip(BEFORE, NOISE, IS_OLD, strict=True)
    ]


def refusal(after: list[Lengths]) -> str:
    return judge(BEFORE, after, IS_OLD).refusal


def test_a_clear_gain_is_taken() -> None:
    verdict = judge(BEFORE, changed(0.1, 0.08), IS_OLD)
    assert verdict.refusal == ""
    assert verdict.after.greedy > verdict.before.greedy
    assert verdict.num_windows == 24


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (changed(-0.3, -0.3), "gains"),
        (changed(0.0, 0.0), "gains"),
        (changed(0.005, 0.005), "gains"),
        (changed(0.3, -0.06), "rounds at temperature 1 lose"),
        (changed(-0.06, 0.3), "greedy rounds lose"),
        (changed(0.25, 0.25, old=-0.35), "rounds of older traffic lose"),
        ([Lengths(math.nan, math.nan)] * 24, "not finite"),
    ],
)
def test_what_is_refused_and_why(after: list[Lengths], words: str) -> None:
    assert words in refusal(after)


def test_a_gain_that_may_be_chance_is_doubtful() -> None:
    """More windows tell, where the mean gains; a loss is one without them."""
    rough = [2.0 * math.sin(place) for place in range(24)]

    def verdict(gain: float) -> Verdict:
        after = [
            Lengths(each.greedy + gain + noise, each.sampled + gain + noise)
            for each, noise in zip(BEFORE, rough, strict=True)
        ]
        return judge(BEFORE, after, IS_OLD)

    assert verdict(0.2).is_doubtful
    assert "gains" in verdict(0.2).refusal
    assert not verdict(-0.2).is_doubtful
    assert not verdict(2.0).is_doubtful


def test_heads_of_equal_worth_seldom_pass() -> None:
    passed = 0
    for _ in range(400):
        after = [Lengths(each.greedy + _random.gauss(0, 0.2), each.sampled + _random.gauss(0, 0.2)) for each in BEFORE]
        passed += not refusal(after)
    assert passed < 400 * 0.06


def test_the_length_multiplies_acceptance_over_depths() -> None:
    scores = DraftScores(torch.tensor([8.0, 5.0]), torch.tensor([4.0, 2.0]), torch.tensor([10.0, 10.0]))
    lengths = Lengths.of(scores)
    assert lengths.greedy == pytest.approx(1 + 0.8 + 0.8 * 0.5)
    assert lengths.sampled == pytest.approx(1 + 0.4 + 0.4 * 0.2)
