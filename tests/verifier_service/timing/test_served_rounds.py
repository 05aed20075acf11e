"""How long a verifier says its rounds are, against the table of its costs and plain sums."""

from __future__ import annotations

import pytest

from outrider.verifier_service.timing.served_rounds import Served, ServedRounds
from outrider.verifier_service.timing.step_costs import StepCosts

# A row is a millisecond, a forward five more.
SLOPE = ((1, 0.006), (101, 0.106))


@pytest.mark.parametrize("max_open", [1, 2, 48, 64])
def test_rounds_are_told_for_powers_of_two_up_to_the_limit(max_open: int) -> None:
    """10 ms of each round are pauses; a session has three rows."""
    rates = ServedRounds(StepCosts(SLOPE))
    for _ in range(150):
        rates.observe(Served(4, 4, 12, 0.005 + 4 * 0.003 + 0.010))
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
    rates = ServedRounds(costs)
    for num_sessions in (4, 32, 8):
        for _ in range(100):
            costs.observe(num_sessions, seconds(num_sessions), num_sessions=num_sessions)
            rates.observe(Served(num_sessions, num_sessions, num_sessions, seconds(num_sessions)))
    told = rates.round_us(64)
    assert [told[2], told[3], told[5]] == pytest.approx([13_000, 21_000, 69_000], rel=0.05)
