"""What the policy knows of the verifier's work, against what was told."""

from __future__ import annotations

import pytest

from gateway.draft_policy import RoundOutcome
from gateway.verifier_load import VerifierLoad


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
    load = VerifierLoad(100.0, (0.0, 0.001, 0.006), 4.0)
    assert [load.rows_s(length) for length in (0, 1, 2, 3)] == pytest.approx([0.0, 0.0, 0.001, 0.006])
    assert load.rows_s(2.5) == pytest.approx(0.0035), "where less is proposed than is asked for"
    assert load.rows_s(6) == pytest.approx(0.012), "beyond what was told a token costs the mean"
    assert VerifierLoad().rows_s(3) == 0.0


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
