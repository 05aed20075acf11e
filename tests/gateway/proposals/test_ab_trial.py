"""Two arms of known durations: the shorter is found, at a small price, and found again after a change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outrider.gateway.proposals.run_ahead import ABTrial


def run(trial: ABTrial, num_rounds: int, seconds: Callable[[bool], float]) -> float:
    """Share of the rounds that went the second way."""
    num_second = 0
    for _ in range(num_rounds):
        second = trial.takes_second
        num_second += second
        trial.observe(seconds(second), second=second)
    return num_second / num_rounds


def noisy(first_s: float, second_s: float, seed: int = 0) -> Callable[[bool], float]:
    rng = random.Random(seed)
    return lambda second: (second_s if second else first_s) * rng.uniform(0.7, 1.3)


@pytest.mark.parametrize(("second_s", "expected"), [(0.9, True), (1.1, False), (0.5, True), (2.0, False)])
def test_the_shorter_way_is_taken(second_s: float, expected: bool) -> None:
    trial = ABTrial()
    run(trial, 200, noisy(1.0, second_s))
    share = run(trial, 8_000, noisy(1.0, second_s))
    assert share > 0.9 if expected else share < 0.1


def test_a_plain_difference_ends_the_comparison_early() -> None:
    for seconds, expected in ((noisy(1.0, 0.6), True), (noisy(1.0, 1.6), False)):
        trial = ABTrial(turn_rounds=8, trial_rounds=96)
        assert run(trial, 64, seconds) == 0.5, "a third of it is always made"
        assert run(trial, 400, seconds) == float(expected)


def test_what_may_be_luck_does_not() -> None:
    trial = ABTrial(turn_rounds=8, trial_rounds=96)
    assert run(trial, 184, noisy(1.0, 0.97)) == pytest.approx(0.5, abs=0.03)


def test_a_gain_within_the_noise_is_none() -> None:
    trial = ABTrial()
    run(trial, 200, lambda second: 0.99 if second else 1.0)
    assert not trial.takes_second


def test_a_change_is_noticed_long_before_the_comparison_is_due() -> None:
    trial = ABTrial()
    run(trial, 20_000, noisy(1.0, 0.8))
    assert trial.takes_second
    run(trial, 400, noisy(1.0, 1.6))
    assert not trial.takes_second


@pytest.mark.parametrize("num_turns", [2, 4])
@pytest.mark.parametrize("change", [-0.3, 0.3])
def test_what_gets_easier_or_harder_over_some_turns_favours_neither(num_turns: int, change: float) -> None:
    """As the texts of requests that came together do, again and again."""
    trial, num_second = ABTrial(turn_rounds=16, trial_rounds=96), 0
    for place in range(4_000):
        second = trial.takes_second
        num_second += second
        far = place / (16 * num_turns) % 1.0
        trial.observe((1.05 if second else 1.0) * (1.0 + change * far), second=second)
    assert num_second < 400


def test_one_hiccup_decides_nothing() -> None:
    trial = ABTrial()
    for place in range(200):
        second = trial.takes_second
        trial.observe(100.0 if place == 40 and second else 0.8 if second else 1.0, second=second)
    assert trial.takes_second
