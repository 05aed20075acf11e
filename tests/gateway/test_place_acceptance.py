"""How often each place of a draft is accepted, against the chances that the drafts were drawn by."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul

import pytest

from gateway.place_acceptance import PlaceAcceptance

CHANCES = (0.9, 0.7, 0.5, 0.3)


def learned(num_tokens: int, num_drafts: int = 3_000) -> tuple[PlaceAcceptance, float]:
    """After drafts of so many tokens; with the mean acceptance over all places."""
    places, rng, num_accepted, num_reached = PlaceAcceptance(), random.Random(0), 0, 0
    for _ in range(num_drafts):
        accepted = next((n for n in range(num_tokens) if rng.random() >= CHANCES[n]), num_tokens)
        reached = min(num_tokens, accepted + 1)
        places.observe(accepted, reached, 0.999)
        num_accepted, num_reached = num_accepted + accepted, num_reached + reached
    return places, num_accepted / num_reached


def test_before_anything_is_seen_every_place_is_like_the_mean() -> None:
    assert PlaceAcceptance().survival(0.7, 0.7, 3) == pytest.approx([0.7, 0.49, 0.343])
    assert PlaceAcceptance().survival(0.0, 0.0, 2) == [0.0, 0.0]


def test_each_place_is_known_by_itself() -> None:
    places, mean = learned(4)
    assert places.survival(mean, mean, 4) == pytest.approx(list(accumulate(CHANCES, mul)), rel=0.1)


def test_a_place_that_is_not_drafted_is_like_the_mean_and_one_that_no_longer_is_stays_known() -> None:
    places, mean = learned(2)
    _first, second, third = places.survival(mean, mean, 3)
    assert third / second == pytest.approx(mean)
    places, mean = learned(4)
    before = places.survival(mean, mean, 4)
    for _ in range(3_000):
        places.observe(1, 1, 0.999)
    after = places.survival(mean, mean, 4)
    assert after[0] > before[0]
    assert after[3] / after[2] == pytest.approx(before[3] / before[2])


def test_a_session_that_is_accepted_more_often_is_so_at_every_place() -> None:
    places, mean = learned(4)
    of_all, its_own = places.survival(mean, mean, 4), places.survival(mean, 1.2 * mean, 4)
    assert its_own[1] == pytest.approx(min(1.0, 1.2 * CHANCES[0]) * 1.2 * CHANCES[1], rel=0.1)
    assert all(own > one for own, one in zip(its_own, of_all, strict=True))
    assert max(places.survival(mean, 1.0, 4)) <= 1.0
