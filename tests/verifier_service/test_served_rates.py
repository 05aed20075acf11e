"""What a verifier tells of its rate and its prices, against the table of its costs and plain sums."""

from __future__ import annotations

import pytest

from outrider.shared.draft_policy.draft_prices import PRICED_DRAFTS
from outrider.verifier_service.served_rates import Served, ServedRates
from outrider.verifier_service.timing.step_costs import StepCosts

# A forward of up to 16 rows takes 10 ms, of up to 32 15 ms.
STAIRS = ((1, 0.010), (16, 0.010), (17, 0.015), (32, 0.015), (33, 0.020))
# A row is a millisecond, a forward five more.
SLOPE = ((1, 0.006), (101, 0.106))


def served(
    rates: ServedRates, *num_sessions: int, num_open: int = 0, rows_each: int = 1, seconds: float = 0.01
) -> None:
    """150 forwards, of so many sessions in turn."""
    for turn in range(150):
        num = num_sessions[turn % len(num_sessions)]
        rates.observe(Served(max(num, num_open), num, num * rows_each, num * rows_each, seconds))


def prices(rates: ServedRates, num_open: int) -> dict[float, int]:
    return dict(zip(PRICED_DRAFTS, rates.draft_rows_us(num_open), strict=True))


def test_the_price_of_a_draft_is_that_of_its_step() -> None:
    """4 sessions: three draft tokens of each fill 16 rows, a fourth begins the next step of the staircase."""
    rates = ServedRates(StepCosts(STAIRS))
    served(rates, 4)
    told = prices(rates, 4)
    assert [told[length] for length in (0.25, 1, 2, 3)] == [0] * 4
    assert [told[length] for length in (3.25, 4, 5, 7)] == pytest.approx([5_000] * 4, abs=1)
    assert told[8] > 5_000


def test_where_forwards_vary_the_price_is_between_theirs() -> None:
    """3 and 4 sessions of 4 in turn: four draft tokens are on one step of the staircase for 3, on the next for 4."""
    rates = ServedRates(StepCosts(STAIRS))
    served(rates, 3, 4, num_open=4)
    told = []
    for num_sessions in (3, 4) * 4:
        rates.observe(Served(4, num_sessions, num_sessions, num_sessions, 0.01))
        told.append(prices(rates, 4)[4])
    assert told == pytest.approx([2_500] * 8, rel=0.1)


def test_prices_are_those_of_the_sessions_that_there_are_now() -> None:
    """Sixteen come while two are left, and end: each time the first to ask is told what holds for all of them."""
    costs = StepCosts(SLOPE)
    rates = ServedRates(costs)
    for num_sessions in (2, 16, 1):
        told = rates.draft_rows_us(num_sessions)
        assert told == pytest.approx([num_sessions * 1_000 * length for length in PRICED_DRAFTS], rel=0.01)
        served(rates, num_sessions)
        assert rates.draft_rows_us(num_sessions) == pytest.approx(told, rel=0.01)


def test_where_forwards_serve_half_of_the_sessions_prices_are_of_half_of_more() -> None:
    rates = ServedRates(StepCosts(SLOPE))
    served(rates, 4, num_open=8)
    assert prices(rates, 16)[1] == pytest.approx(8_000, rel=0.01)
    assert prices(rates, 1)[1] == pytest.approx(1_000, rel=0.01), "but at least one is served"


@pytest.mark.parametrize(("before", "now"), [(1, 16), (16, 1), (4, 8), (8, 8)])
def test_the_rate_is_that_of_the_sessions_that_there_are_now(before: int, now: int) -> None:
    """Three tokens and rows of each session in a forward, and 2 ms between two of them."""
    rates = ServedRates(StepCosts(SLOPE))

    def seconds(num_sessions: int) -> float:
        return 0.002 + 0.005 + 0.001 * 3 * num_sessions

    served(rates, before, rows_each=3, seconds=seconds(before))
    assert rates.tokens_per_s(now) == pytest.approx(3 * now / seconds(now), rel=0.01)


def test_prices_follow_what_forwards_take() -> None:
    """Within some forwards, although they are not worked out anew in each of them."""
    costs = StepCosts(STAIRS)
    rates = ServedRates(costs)
    before = prices(rates, 4)[4]
    for turn in range(400):
        num_rows, late = (20, 0.02) if turn % 2 else (4, 0.01)
        costs.observe(num_rows, late, num_sessions=4)
        rates.observe(Served(4, 4, num_rows, 4, late))
        told = prices(rates, 4)[4]
    assert before == 5_000
    assert told == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize("max_open", [1, 2, 48, 64])
def test_rounds_are_told_for_powers_of_two_up_to_the_limit(max_open: int) -> None:
    """10 ms of each round are pauses; a session has three rows."""
    rates = ServedRates(StepCosts(SLOPE))
    served(rates, 4, rows_each=3, seconds=0.005 + 4 * 0.003 + 0.010)
    told = rates.round_us(max_open)
    counts = [1 << power for power in range(len(told))]
    assert counts[-1] >= max_open
    assert counts[-1] < 2 * max_open
    assert told == pytest.approx([15_000 + 3_000 * count for count in counts], rel=0.01)


def test_what_sessions_cost_beside_their_rows_is_in_the_rounds_once_it_was_seen() -> None:
    """A session costs a millisecond of replies and sampling, which the table of forwards cannot know."""

    def seconds(num_sessions: int) -> float:
        return 0.005 + 0.002 * num_sessions

    costs = StepCosts(SLOPE)
    rates = ServedRates(costs)
    for num_sessions in (4, 32, 8):
        for _ in range(100):
            costs.observe(num_sessions, seconds(num_sessions), num_sessions=num_sessions)
            rates.observe(Served(num_sessions, num_sessions, num_sessions, num_sessions, seconds(num_sessions)))
    told = rates.round_us(64)
    assert [told[2], told[3], told[5]] == pytest.approx([13_000, 21_000, 69_000], rel=0.05)
