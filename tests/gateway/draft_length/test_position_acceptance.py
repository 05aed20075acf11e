"""How often each place of a draft is accepted, against the chances that the drafts were drawn by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest

from outrider.gateway.draft_length.position_acceptance import PositionAcceptance

CHANCES = (0.9, 0.7, 0.5, 0.3)


def learned(num_tokens: int, chances: Sequence[float] = CHANCES) -> tuple[PositionAcceptance, float]:
    """After drafts of so many tokens; with the mean acceptance over all positions."""
    positions, num_accepted, num_reached = PositionAcceptance(), 20.0, 30.0
    rng = random.Random(0)
    for _ in range(3_000):
        accepted = next((n for n in range(num_tokens) if rng.random() >= chances[n]), num_tokens)
        reached = min(num_tokens, accepted + 1)
        num_accepted, num_reached = 0.999 * num_accepted + accepted, 0.999 * num_reached + reached
        positions.observe(accepted, reached, num_tokens, num_accepted / num_reached, 0.999)
    return positions, num_accepted / num_reached


def last_to_third(survival: Sequence[float]) -> float:
    """How the chances of the last two of four positions compare."""
    return (survival[3] / survival[2]) / (survival[2] / survival[1])


def test_before_anything_is_seen_every_place_is_like_the_mean() -> None:
    assert PositionAcceptance().survival(0.7, 3) == pytest.approx([0.7, 0.49, 0.343])
    assert PositionAcceptance().survival(0.0, 2) == [0.0, 0.0]


def test_each_position_has_its_own_acceptance() -> None:
    positions, mean = learned(4)
    assert positions.survival(mean, 4) == pytest.approx(list(accumulate(CHANCES, mul)), rel=0.1)


def test_a_place_that_was_never_drafted_is_like_the_mean_and_one_that_no_longer_is_keeps_its_share() -> None:
    positions, mean = learned(2)
    _first, second, third = positions.survival(mean, 3)
    assert third / second == pytest.approx(mean)
    positions, mean = learned(4)
    before = positions.survival(mean, 4)
    for _ in range(3_000):
        positions.observe(1, 1, 1, mean, 0.999)
        positions.observe_end(0, 1, mean)
    after = positions.survival(mean, 4)
    assert after == pytest.approx(before, rel=1e-3), "shorter drafts say nothing of the longer ones' positions"
    for _ in range(100_000):
        positions.observe(1, 1, 1, 0.95, 0.999)
    after = positions.survival(0.95, 4)
    assert (positions.drafted_length, after[0]) == (1, pytest.approx(0.95)), "until the longer ones are long ago"
    assert last_to_third(after) == pytest.approx(last_to_third(before))


def test_a_draft_that_the_end_of_the_output_cut_short_counts_for_its_places() -> None:
    positions, mean = learned(4)
    before = positions.survival(mean, 4)
    num_accepted, num_reached = 50.0 * mean, 50.0
    for _ in range(400):
        num_accepted, num_reached = 0.98 * num_accepted, 0.98 * num_reached + 1.0
        positions.observe(0, 1, 4, num_accepted / num_reached, 0.98)
    assert positions.survival(num_accepted / num_reached, 4)[0] < 0.2 * before[0]


def test_a_session_that_is_accepted_more_often_is_so_at_every_place() -> None:
    positions, mean = learned(4)
    of_all, its_own = positions.survival(mean, 4), positions.survival(1.2 * mean, 4)
    assert its_own[1] == pytest.approx(min(1.0, 1.2 * CHANCES[0]) * 1.2 * CHANCES[1], rel=0.1)
    assert all(own > one for own, one in zip(its_own, of_all, strict=True))
    assert max(positions.survival(1.0, 4)) <= 1.0


def test_what_copying_has_taught_promises_nothing_where_nothing_is_copied() -> None:
    """n-grams: once found, a copy goes on; at temperature 1 hardly any is."""
    positions, mean = learned(4, (0.5, 0.8, 0.9, 0.95))
    assert sum(positions.survival(mean, 4)) > 1.5
    for _ in range(200):
        positions.observe(0, 1, 4, 0.1, 0.98)
    assert sum(positions.survival(0.1, 4)) < 0.12


def test_long_drafts_of_hard_text_alone_leave_the_level_to_the_mean() -> None:
    """Long drafts are made at the start of a burst only: they show how the positions compare."""
    chances, rng = (0.4, 0.6, 0.7, 0.7, 0.7), random.Random(1)
    positions, num_accepted, num_reached = PositionAcceptance(), 35.0, 50.0
    for round_number in range(20_000):
        is_hard = round_number % 100 < 15
        num_tokens, ease = (5, 0.6) if is_hard else (1, 1.5)
        accepted = next((n for n in range(num_tokens) if rng.random() >= ease * chances[n]), num_tokens)
        reached = min(num_tokens, accepted + 1)
        num_accepted, num_reached = 0.98 * num_accepted + accepted, 0.98 * num_reached + reached
        positions.observe(accepted, reached, num_tokens, num_accepted / num_reached, 0.98)
    mean = num_accepted / num_reached
    survival = positions.survival(mean, 5)
    of_reached = sum(survival) / (1.0 + sum(survival[:4]))
    assert (positions.drafted_length, of_reached) == (5, pytest.approx(mean, rel=0.02))
    assert mean == pytest.approx(1.5 * chances[0], rel=0.15)
    assert survival[1] / survival[0] > 1.2 * survival[0], "the later positions are still the better ones"
