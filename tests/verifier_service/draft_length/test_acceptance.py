"""Acceptance per position, counted by hand; and that it follows the text."""

from __future__ import annotations

import random

import pytest

from outrider.verifier_service.draft_length.acceptance import Acceptance


def drawn(chances: tuple[float, ...], rng: random.Random) -> int:
    return next((place for place, chance in enumerate(chances) if rng.random() >= chance), len(chances))


def test_expected_tokens_are_the_products_of_the_chances() -> None:
    rng, acceptance, chances = random.Random(0), Acceptance(), (0.9, 0.6, 0.3)
    for _ in range(2000):
        acceptance.observe([(drawn(chances, rng), 3)], 1, 3)
    expected = [1.0, 1.9, 1.9 + 0.9 * 0.6, 1.9 + 0.9 * 0.6 + 0.9 * 0.6 * 0.3]
    assert acceptance.tokens(3) == pytest.approx(expected, rel=0.05)
    beyond = acceptance.tokens(5)
    assert beyond[:4] == acceptance.tokens(3), "positions that no draft has reached change nothing before them"
    assert beyond[4] > beyond[3]


def test_rounds_in_which_nothing_is_found_count() -> None:
    acceptance = Acceptance()
    for found in [True, False, False, False] * 100:
        acceptance.observe([(2, 2)] if found else [], 1, 2)
    assert acceptance.proposed == pytest.approx(0.25, abs=0.02)
    assert acceptance.tokens(2)[2] == pytest.approx(1 + 0.25 * 2, abs=0.1)


def test_an_upper_bound_closes_in_with_drafts() -> None:
    rng, acceptance, bounds = random.Random(1), Acceptance(), []
    for _ in range(3):
        bounds.append(acceptance.tokens(2, errors=1.0)[2] - acceptance.tokens(2)[2])
        for _ in range(30):
            acceptance.observe([(drawn((0.5, 0.5), rng), 2)], 1, 2)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] > 0.0


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_drafts_that_contradict_the_memory_replace_it(before: float, after: float) -> None:
    """Within 40 drafts, of which a memory of 400 would have taken a tenth."""
    rng, acceptance = random.Random(2), Acceptance()
    for chance, count in ((before, 400), (after, 40)):
        for _ in range(count):
            acceptance.observe([(drawn((chance,) * 3, rng), 3)], 1, 3)
    was, becomes = (1 + chance + chance**2 + chance**3 for chance in (before, after))
    assert abs(acceptance.tokens(3)[3] - becomes) < 0.5 * abs(was - becomes)


def test_steady_text_is_not_forgotten() -> None:
    rng, acceptance, worst = random.Random(3), Acceptance(), 0.0
    for count in range(4000):
        acceptance.observe([(drawn((0.7, 0.7), rng), 2)], 1, 2)
        if count > 400:
            worst = max(worst, abs(acceptance.tokens(1)[1] - 1.7))
    assert worst < 0.2
