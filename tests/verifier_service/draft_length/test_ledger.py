"""What drafting may cost at worst: LOSS_SHARE of the time, and the credit."""

from __future__ import annotations

import random

import pytest

from outrider.verifier_service.draft_length.ledger import Ledger
from outrider.verifier_service.draft_length.limits import CREDIT_ROUNDS, LOOK_ROUNDS, LOOK_SHARE, LOSS_SHARE

PLAIN_S = 0.01


@pytest.mark.parametrize("cost", [1.05, 2.0, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_drafts_whenever_allowed_loses_no_more_than_that(cost: float, seed: int) -> None:
    """A round with drafts takes `cost` times as long, and never brings a token more."""
    rng, ledger, seconds, num_rounds = random.Random(seed), Ledger(), 0.0, 20_000
    for _ in range(num_rounds):
        has_drafts = ledger.allows_drafts(PLAIN_S) and rng.random() < 0.9
        round_s = PLAIN_S * (cost if has_drafts else 1.0)
        ledger.observe(PLAIN_S, round_s, PLAIN_S)
        seconds += round_s
    lost_s = seconds - num_rounds * PLAIN_S
    longest_s = cost * PLAIN_S  # the round in which the credit ends
    assert lost_s <= LOSS_SHARE * seconds + CREDIT_ROUNDS * PLAIN_S + longest_s
    assert lost_s > 0.5 * LOSS_SHARE * seconds, "what may be lost is used"


def test_gains_are_kept_up_to_the_credit_alone() -> None:
    ledger = Ledger()
    for _ in range(1000):
        ledger.observe(2 * PLAIN_S, PLAIN_S, PLAIN_S)
    assert ledger.credit_s == pytest.approx(CREDIT_ROUNDS * PLAIN_S)


def test_drafting_begins_again_with_half_of_the_credit() -> None:
    ledger = Ledger()
    ledger.observe(PLAIN_S, 100 * PLAIN_S, PLAIN_S)
    assert not ledger.allows_drafts(PLAIN_S)
    while not ledger.allows_drafts(PLAIN_S):
        ledger.observe(PLAIN_S, 0.9 * PLAIN_S, PLAIN_S)
    assert ledger.credit_s == pytest.approx(0.5 * CREDIT_ROUNDS * PLAIN_S, rel=0.02)


def test_looks_cost_more_only_where_drafting_has_gained_and_stopped() -> None:
    ledger = Ledger()
    assert ledger.look_share(is_drafting=False) == LOOK_SHARE
    for _ in range(3000):
        ledger.observe(1.5 * PLAIN_S, PLAIN_S, PLAIN_S)
    assert ledger.look_share(is_drafting=True) == LOOK_SHARE
    gained = ledger.look_share(is_drafting=False)
    assert gained > 10 * LOOK_SHARE
    for _ in range(10_000):
        ledger.observe(PLAIN_S, PLAIN_S, PLAIN_S)
    assert ledger.look_share(is_drafting=False) == pytest.approx(LOOK_SHARE, rel=0.05)


def test_a_look_that_has_gained_lends_a_small_credit() -> None:
    """Without one, drafting that pays would wait until LOSS_SHARE of the time has paid for what was lost before."""
    ledger = Ledger()
    ledger.observe(PLAIN_S, 100 * PLAIN_S, PLAIN_S)
    assert not ledger.allows_drafts(PLAIN_S)
    before_s = ledger.credit_s
    lent_s = ledger.look_gained(PLAIN_S)
    assert ledger.credit_s == pytest.approx(LOOK_ROUNDS * PLAIN_S) == pytest.approx(before_s + lent_s)
    assert ledger.allows_drafts(PLAIN_S)
    assert ledger.look_gained(PLAIN_S) == 0.0, "there is credit"
