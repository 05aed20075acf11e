"""Numbers of sessions that are close to each other are one load."""

from __future__ import annotations

from outrider.verifier_service.timing.step_costs import load_of


def test_each_doubling_has_four_loads() -> None:
    assert [load_of(2**power) for power in range(6)] == [4 * power for power in range(6)]
    loads = [load_of(num_sessions) for num_sessions in range(1, 200)]
    assert loads == sorted(loads)


def test_close_numbers_of_sessions_are_one_load() -> None:
    assert load_of(30) == load_of(32) == load_of(34)
    assert load_of(24) < load_of(32)
    assert [load_of(num_sessions) for num_sessions in (1, 2, 3, 4)] == [0, 4, 6, 8]
