"""What a draft brings and costs in tokens, by its definition."""

from __future__ import annotations

import pytest

from gateway.draft_costs import MethodCosts, VerifierLoad, blend


def test_the_gain_is_its_definition() -> None:
    """100 tokens/s of 4 sessions; a row costs 0.1 token, a position 2 ms of a session's 25 tokens/s."""
    load = VerifierLoad(100.0, 0.001, 4.0)
    costs = MethodCosts(0.002, 0.01, proposed=0.8)
    accepted = 0.5 + 0.25 + 0.125 - 3 * 0.1
    assert costs.gain(load, 0.5, 3) == pytest.approx(0.8 * accepted - 25.0 * (3 * 0.002 + 0.01))
    without = costs.gain(load, 0.5, 3, with_round_trip=False)
    assert without == pytest.approx(0.8 * accepted - 25.0 * 3 * 0.002)
    assert MethodCosts().gain(VerifierLoad(), 0.5, 2) == pytest.approx(0.75)


def test_blending() -> None:
    assert blend(None, 3.0, 0.1) == 3.0
    assert blend(2.0, 3.0, 0.25) == 2.25
    assert blend(0.0, 1.0, 0.5) == 0.5
