"""What drafting takes by its depth, against the line that the times were made from."""

from __future__ import annotations

import random

import pytest

from outrider.gateway.draft_length.local_draft_time import LocalDraftTime

FIRST_S, TOKEN_S, WEIGHT = 0.0046, 0.0022, 0.05


def time_of(depth: int) -> float:
    return FIRST_S + depth * TOKEN_S


def test_rounds_of_different_depth_tell_what_a_token_costs() -> None:
    taken, rng = LocalDraftTime(), random.Random(1)
    for _ in range(400):
        depth = rng.randint(1, 5)
        taken.observe(depth, time_of(depth) * rng.uniform(0.95, 1.05), WEIGHT)
    assert taken.token_s == pytest.approx(TOKEN_S, rel=0.15)
    assert taken.first_s == pytest.approx(FIRST_S, rel=0.15)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_at_the_depth_that_is_drafted_it_is_what_was_measured(depth: int) -> None:
    taken = LocalDraftTime()
    for _ in range(100):
        taken.observe(depth, time_of(depth), WEIGHT)
    assert taken.first_s + depth * taken.token_s == pytest.approx(time_of(depth))
    assert taken.first_s >= 0.0
    assert 0.0 <= taken.token_s <= time_of(depth) / depth


def test_a_hiccup_counts_for_little_and_a_slow_start_for_nothing() -> None:
    taken = LocalDraftTime()
    taken.observe(3, 0.4, WEIGHT)
    taken.observe(3, time_of(3), WEIGHT)
    assert taken.first_s + 3 * taken.token_s == pytest.approx(time_of(3))
    taken.observe(3, 0.4, WEIGHT)
    assert taken.first_s + 3 * taken.token_s <= 1.11 * time_of(3)


def test_nothing_costs_nothing() -> None:
    assert (LocalDraftTime().first_s, LocalDraftTime().token_s) == (0.0, 0.0)
