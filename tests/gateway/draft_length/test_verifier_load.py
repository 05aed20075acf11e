"""What the policy knows of the verifier's work, against what was told."""

from __future__ import annotations

import math

import pytest

from outrider.gateway.draft_length.draft_policy import RoundOutcome
from outrider.gateway.draft_length.verifier_load import VerifierLoad
from outrider.shared.draft_policy.draft_prices import PRICED_DRAFTS
from outrider.verifier_service.timing.step_costs import StepCosts


def told(batch_sessions: int, open_sessions: int = 0, *, verify_s: float = 0.01) -> RoundOutcome:
    return RoundOutcome(
        num_asked=0,
        num_draft_tokens=0,
        num_accepted=0,
        batch_sessions=batch_sessions,
        draft_rows_s=(0.001, 0.002),
        tokens_per_s=100.0,
        draft_s=0.0,
        overhead_s=0.0,
        verify_s=verify_s,
        open_sessions=open_sessions,
    )


def test_a_draft_costs_what_its_length_adds_to_a_forward() -> None:
    """Told for parts of a token, of every session in the mean."""
    load = VerifierLoad(100.0, (0.0, 0.0, 0.001, 0.006, 0.008), 4.0)
    assert [load.rows_s(length) for length in (0, 0.25, 0.5, 0.75)] == pytest.approx([0.0, 0.0, 0.001, 0.006])
    assert load.rows_s(1 / 32) == pytest.approx(0.0)
    assert load.rows_s(0.625) == pytest.approx(0.0035)
    assert load.rows_s(1.0) == pytest.approx(0.008)
    assert load.rows_s(3) == pytest.approx(0.024), "beyond what was told a token costs the mean"
    assert VerifierLoad().rows_s(3) == 0.0


@pytest.mark.parametrize("proposed", [0.0, 0.1, 0.35, 0.7, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 3])
@pytest.mark.parametrize("num_sessions", [4, 16])
def test_drafts_that_only_some_sessions_have_cost_what_they_do_in_the_mean(
    proposed: float, num_draft_tokens: int, num_sessions: int
) -> None:
    """Against every number of them, as often as it comes, on a staircase with a step behind 16 rows."""
    costs = StepCosts([(1, 0.010), (16, 0.010), (17, 0.013), (20, 0.014), (64, 0.030)])
    prices_s = tuple(costs.drafts_s(num_sessions, length) for length in PRICED_DRAFTS)
    load = VerifierLoad(100.0, prices_s, float(num_sessions))
    plain_s = costs.seconds(num_sessions)
    truth = sum(
        math.comb(num_sessions, count)
        * proposed**count
        * (1.0 - proposed) ** (num_sessions - count)
        * (costs.seconds(num_sessions + count * num_draft_tokens) - plain_s)
        for count in range(num_sessions + 1)
    )
    assert load.proposals_s(num_draft_tokens, proposed) == pytest.approx(truth, abs=0.0005)


def test_a_method_that_finds_next_to_nothing_costs_next_to_nothing() -> None:
    load = VerifierLoad(100.0, (0.001,) * len(PRICED_DRAFTS), 15.7)
    prices_s = [load.proposals_s(3, 0.95**num_rounds) for num_rounds in range(1_000)]
    assert prices_s == sorted(prices_s, reverse=True)
    assert prices_s[0] == load.proposals_s(3, 1.0 + 1e-12) == 0.001, "always, and a rounding error more often"
    assert prices_s[-1] == 0.0


def test_the_sessions_of_a_forward_are_those_that_there_are_now() -> None:
    """A burst of 16 comes while 2 are left, and is known with its first commit, which read a prompt beside 3 others."""
    load = VerifierLoad()
    for _ in range(200):
        load.observe(told(2, 2))
    load.observe(told(4, 16, verify_s=0.0))
    assert load.batch_sessions == 16.0
    for _ in range(200):
        load.observe(told(16, 16))
    load.observe(told(1, 1))
    assert load.batch_sessions == 1.0


def test_where_forwards_serve_half_of_the_sessions_they_will_serve_half_of_more() -> None:
    load = VerifierLoad()
    for turn in range(400):
        load.observe(told(3 + turn % 3, 8))
    assert load.batch_sessions == pytest.approx(4.0, rel=0.05)
    load.observe(told(4, 16))
    assert load.batch_sessions == pytest.approx(8.0, rel=0.05)


def test_a_verifier_that_does_not_tell_of_open_sessions_has_those_of_its_forwards() -> None:
    load = VerifierLoad()
    load.observe(told(5))
    assert load.batch_sessions == 5.0


def test_a_session_that_drafts_beside_others_pays_no_step_that_they_have_paid() -> None:
    """Of a forward of 16 rows the first draft token costs 3 ms, each one 0.1 ms more."""
    costs = StepCosts([(1, 0.010), (16, 0.010), (17, 0.013), (97, 0.021)])
    load = VerifierLoad(100.0, tuple(costs.drafts_s(16, length) for length in PRICED_DRAFTS), 16.0)
    assert load.proposals_s(2, 0.5) == pytest.approx(0.003 + 16 * 0.0001, rel=0.05)
    assert load.further_proposals_s(2, 0.5) == pytest.approx(16 * 0.0001, rel=0.1)


@pytest.mark.parametrize("proposed", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("num_sessions", [1, 16])
def test_where_all_rows_cost_as_much_it_pays_for_its_own(num_sessions: int, proposed: float) -> None:
    load = VerifierLoad(100.0, tuple(0.001 * num_sessions * length for length in PRICED_DRAFTS), float(num_sessions))
    assert load.further_proposals_s(3, proposed) == pytest.approx(3 * proposed * 0.001 * num_sessions, rel=0.02)
