"""What one caller holds in the log leaves the others their room."""

from __future__ import annotations

import pytest

from outrider.shared.errors import GatewayFull, PayloadTooLarge, QuotaExceeded
from outrider.shared.log.log_budget import LogBudget

MIB = 2**20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(clock: Clock) -> LogBudget:
    return LogBudget(max_record_bytes=4 * MIB, total_bytes=40 * MIB, clock=clock)


def test_one_key_fills_its_quarter_and_others_are_served(budget: LogBudget, clock: Clock) -> None:
    for _ in range(3):
        budget.hold("greedy", 3 * MIB, 600)
    with pytest.raises(QuotaExceeded) as refused:
        budget.hold("greedy", 3 * MIB, 600)
    assert refused.value.retry_after_s == 600
    for number in range(60):
        budget.hold(f"other-{number}", 1000, 600)
    clock.now = 600.0
    budget.hold("greedy", 3 * MIB, 600)


def test_the_gateway_has_a_limit_of_its_own(budget: LogBudget) -> None:
    for number in range(10):
        budget.hold("", 4 * MIB - 2048, 100 + number)
    with pytest.raises(GatewayFull, match="try again later") as refused:
        budget.hold("", MIB, 100)
    assert refused.value.retry_after_s == 100


def test_a_record_has_a_limit(budget: LogBudget) -> None:
    with pytest.raises(PayloadTooLarge, match="4194305 bytes in the log, the most is 4194304"):
        budget.hold("", 4 * MIB + 1, 600)


def test_a_request_under_way_is_counted_as_long_as_it_is_touched(budget: LogBudget, clock: Clock) -> None:
    hold = budget.hold("", 1000, 60)
    for clock.now in (50.0, 100.0, 650.0):
        budget.grow(hold, 500, 600)
    before_end = budget.num_bytes
    assert before_end == 1000 + 1024 + 3 * (500 + 64)
    budget.grow(hold, 0, 60)
    clock.now = 709.0
    assert budget.num_bytes == before_end + 64
    clock.now = 710.0
    assert budget.num_bytes == 0


def test_what_had_expired_and_is_written_again_counts_again(budget: LogBudget, clock: Clock) -> None:
    hold = budget.hold("", 1000, 60)
    clock.now = 61.0
    assert budget.num_bytes == 0
    budget.grow(hold, 500, 600)
    assert budget.num_bytes == 1000 + 1024 + 564
    clock.now = 661.0
    assert budget.num_bytes == 0
