"""Drafting times and rates against what they were made of."""

from __future__ import annotations

import pytest

from outrider.verifier_service.draft_length.costs import DraftTime, MethodCosts, Rounds
from outrider.verifier_service.draft_length.limits import OUTLIER, PLAIN_ROUNDS


def test_overhead_and_time_per_token_are_told_apart_once_lengths_vary() -> None:
    time = DraftTime()
    for turn in range(200):
        length = 1 + turn % 5
        time.observe(length, 0.004 + 0.001 * length)
    assert [time.seconds(length) for length in (1, 3, 8)] == pytest.approx([0.005, 0.007, 0.012], rel=0.1)


def test_a_method_of_one_pass_is_not_taken_to_be_slower_for_longer_drafts() -> None:
    one_pass, sequential = DraftTime(is_one_pass=True), DraftTime()
    for time in (one_pass, sequential):
        for _ in range(20):
            time.observe(2, 0.004)
    assert one_pass.seconds(5) == pytest.approx(0.004)
    assert sequential.seconds(5) > 0.006


def test_a_hiccup_moves_a_mean_by_a_bounded_amount() -> None:
    time, rounds = DraftTime(), Rounds()
    for _ in range(50):
        time.observe(2, 0.004)
        rounds.add(1, 0.01)
    time.observe(2, 10.0)
    rounds.add(1, 10.0)
    assert time.seconds(2) < 0.004 * (1 + 0.05 * OUTLIER)
    assert rounds.mean_s < 0.01 * (1 + OUTLIER / 50)


def test_the_first_draft_that_has_nothing_to_catch_up_with_counts_alone() -> None:
    time = DraftTime()
    time.observe(2, 0.5)
    time.observe(2, 0.004)
    assert time.seconds(2) == pytest.approx(0.004)


def test_measured_rounds_outweigh_the_model_in_time() -> None:
    costs = MethodCosts(DraftTime())
    assert costs.slowness == 1.0
    slowness = []
    for _ in range(10 * PLAIN_ROUNDS):
        costs.drafted.add(2, 0.03)
        costs.modelled.add(0, 0.02)
        slowness.append(costs.slowness)
    assert slowness == sorted(slowness)
    assert slowness[PLAIN_ROUNDS - 1] == pytest.approx(1.25, rel=0.01)
    assert slowness[-1] == pytest.approx(1.5, abs=0.06)
