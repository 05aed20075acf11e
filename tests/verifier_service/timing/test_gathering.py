"""Whom a forward waits for, and what the verifier says of its rate; against plain sums."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.attention.block_manager import BlockTable
from outrider.shared.messages import Proposal
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.gathering import NO_ROUND, BatchGathering
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.verifier_service.engine_client import make_session

FORWARD_S = 100.0
# Of the clock that stands still while a test looks at it.
NOW = 5000.0


def work(num_draft_tokens: int = 0, *, is_prefill: bool = False) -> Work:
    session = make_session(num_computed=0 if is_prefill else 1)
    proposal = Proposal(0, (1,) * num_draft_tokens, "x") if num_draft_tokens else None
    return Work(session, BlockTable(), 2 if is_prefill else 1, proposal, 1 + num_draft_tokens)


def make_gathering() -> BatchGathering:
    """One forward has been run, as the table says."""
    gathering = BatchGathering(StepCosts([(1, FORWARD_S), (101, 2 * FORWARD_S)]), clock=lambda: NOW)
    gathering.observe([work()], 1, NOW - FORWARD_S, NOW)
    return gathering


def away(gathering: BatchGathering, since_s: float, return_s: float) -> VerifierSession:
    """A session whose answers take `return_s`, and that was sent its commit `since_s` ago."""
    session = make_session()
    gathering.replied(session, NOW - since_s - 3 * return_s)
    gathering.asked(session, NOW - since_s - 2 * return_s)
    gathering.replied(session, NOW - since_s)
    return session


def test_it_waits_for_one_that_will_be_back_in_time() -> None:
    gathering = make_gathering()
    session = away(gathering, 0.0, 0.4 * FORWARD_S)
    patience_s = gathering.patience_s([make_session(waits=True), session])
    assert patience_s == pytest.approx(1.3 * 0.4 * FORWARD_S, abs=0.01)


def test_it_waits_for_the_last_of_those_that_will_be_back_in_time() -> None:
    gathering = make_gathering()
    others = [away(gathering, 0.0, share * FORWARD_S) for share in (0.1, 0.5, 0.3, 0.9, 5.0)]
    assert gathering.patience_s([make_session(waits=True), *others]) == pytest.approx(0.65 * FORWARD_S, abs=0.01)


def test_nobody_waits_for_nobody() -> None:
    """Neither for sessions of which nothing is known, nor for the sake of a forward that has no work."""
    gathering = make_gathering()
    new, fresh, waiting = make_session(), make_session(), make_session(waits=True)
    gathering.replied(fresh, NOW)
    assert gathering.patience_s([waiting]) == 0.0
    assert gathering.patience_s([]) == 0.0
    assert gathering.patience_s([waiting, new, fresh, make_session(waits=True)]) == 0.0
    assert gathering.patience_s([away(gathering, 0.0, 0.1 * FORWARD_S)]) == 0.0


@pytest.mark.parametrize(
    ("since_s", "return_s"), [(20.0, 10.0), (1000.0, 10.0), (0.0, 80.0)], ids=["late", "stalled", "too slow"]
)
def test_it_does_not_wait_in_vain(since_s: float, return_s: float) -> None:
    gathering = make_gathering()
    assert gathering.patience_s([make_session(waits=True), away(gathering, since_s, return_s)]) == 0.0


def test_a_full_forward_hardly_waits() -> None:
    """15 here, one away: a wait of w serves 16 in w + T(16) instead of 15 in T(15), so w may be a fifteenth of T."""
    gathering = make_gathering()
    here = [make_session(waits=True) for _ in range(15)]
    assert gathering.patience_s([*here, away(gathering, 0.0, 4.0)]) == pytest.approx(1.3 * 4.0, abs=0.01)
    assert gathering.patience_s([*here, away(gathering, 0.0, 6.0)]) == 0.0


SESSIONS = st.lists(st.tuples(st.booleans(), st.floats(0.0, 2 * FORWARD_S), st.floats(0.01, 2 * FORWARD_S)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(SESSIONS)
def test_no_other_wait_serves_more_sessions_a_second(sessions: list[tuple[bool, float, float]]) -> None:
    gathering = make_gathering()
    states = [make_session(waits=True) if waits else away(gathering, since, back) for waits, since, back in sessions]
    num_here = sum(waits for waits, _since, _back in sessions)
    due = sorted(1.3 * back - since for waits, since, back in sessions if not waits and 1.3 * back > since)
    patience_s = gathering.patience_s(states)
    if not num_here:
        assert patience_s == 0.0
        return

    def rate(wait_s: float) -> float:
        num_served = num_here + sum(left <= wait_s + 0.5 for left in due)
        return num_served / (wait_s + 0.99 * FORWARD_S + 0.01 * FORWARD_S * num_served)

    alone_s = 0.99 * FORWARD_S + 0.01 * FORWARD_S * num_here
    assert patience_s < alone_s
    assert patience_s == 0.0 or any(abs(patience_s - left) < 0.5 for left in due)
    assert rate(patience_s) >= 0.98 * max(rate(wait_s) for wait_s in (0.0, *due) if wait_s < alone_s - 0.5)


def test_a_session_that_stalled_once_is_waited_for_again_later() -> None:
    gathering = make_gathering()
    session = away(gathering, 0.0, 10.0)
    gathering.asked(session, NOW + 1000.0)
    session.replied_at = NOW
    assert gathering.patience_s([make_session(waits=True), session]) == 0.0
    for _ in range(20):
        gathering.replied(session, NOW - 10.0)
        gathering.asked(session, NOW)
    gathering.replied(session, NOW)
    assert 0.0 < gathering.patience_s([make_session(waits=True), session]) < 40.0


@pytest.mark.parametrize("pause_share", [0.0, 0.3, 1.5])
def test_a_round_takes_from_one_forwards_end_to_the_next(pause_share: float) -> None:
    forward_s = 0.01
    gathering, now = BatchGathering(StepCosts([(1, 0.005), (64, 0.05)])), 50.0
    for _ in range(3):
        started = now + pause_share * forward_s
        now = started + forward_s
        gathering.observe([work(5)] * 3, 9, started, now)
    assert gathering.last_round == pytest.approx((9, forward_s * (1 + pause_share)))


def test_idle_hours_and_prefills_are_no_rounds_but_drafting_is_part_of_one() -> None:
    """However long: the first round of a method that reads a prompt is what a look at it costs."""
    gathering = BatchGathering(StepCosts([(1, 0.01), (64, 0.02)]))
    gathering.observe([work()], 1, 50.0, 50.01)
    gathering.observe([work(is_prefill=True)], 0, 50.01, 50.02)
    assert gathering.last_round == NO_ROUND
    gathering.observe([work()], 1, 60.0, 60.01)
    assert gathering.last_round == NO_ROUND
    gathering.observe([work()], 1, 61.0, 61.01, draft_s=0.99)
    assert gathering.last_round == pytest.approx((1, 1.0))


def test_prompts_beside_decoding_are_taken_off_the_round() -> None:
    """Four sessions decode; with a fifth one's prompt in the forward the round takes longer, and tells the same."""
    table = ((1, 0.01), (101, 0.11))
    gathering = BatchGathering(StepCosts(table))
    plain, prompt, now = [work()] * 4, work(is_prefill=True), 50.0
    for with_prompt in (False, True) * 20:
        plan = [*plain, prompt] if with_prompt else plain
        now += 0.013 + 0.002 * with_prompt  # a row is a millisecond, and this prompt has two
        gathering.observe(plan, len(plan), now - 0.013 - 0.002 * with_prompt, now, num_open=5)
        if now > 50.1:
            assert gathering.last_round.num_tokens == 4
            assert gathering.last_round.seconds == pytest.approx(0.013, rel=0.02)


def test_drafts_pay_for_what_prompts_cost_only_because_of_them() -> None:
    """Two prompts take 10 ms without drafts, but 20 ms beside them, as the next step of the row costs is higher."""
    table = [(1, 0.02), (32, 0.02), (33, 0.03), (64, 0.03), (65, 0.05), (128, 0.05)]
    plain, drafting, prompts = [work()] * 31, [work(2)] * 31, [work(is_prefill=True)] * 2
    counted = []
    for plan, seconds in ((plain, 0.02), ([*plain, *prompts], 0.03), (drafting, 0.03), ([*drafting, *prompts], 0.05)):
        gathering = BatchGathering(StepCosts(table))
        for start in (50.0, 50.0 + seconds):
            gathering.observe(plan, 31, start, start + seconds, num_open=33)
        counted.append(gathering.last_round.seconds)
    assert counted == pytest.approx([0.02, 0.02, 0.03, 0.04])


def test_a_round_that_was_mostly_prompts_tells_nothing() -> None:
    gathering = BatchGathering(StepCosts([(1, 0.01), (101, 0.11)]))
    now = 50.0
    for _ in range(10):
        gathering.observe([work()], 1, now, now + 0.01)
        now += 0.01
    before = gathering.served.round_us(4)
    gathering.observe([work(), *[work(is_prefill=True)] * 10], 11, now, now + 0.035)
    assert gathering.last_round == NO_ROUND
    gathering.observe([work()], 1, now + 0.035, now + 0.045)
    assert gathering.served.round_us(4) == pytest.approx(before, rel=0.05)


def test_sessions_that_never_ask_are_not_gathered() -> None:
    """Without drafts the verifier begins its next forward at once."""
    gathering = make_gathering()
    for _ in range(500):
        assert gathering.patience_s([make_session(waits=True) for _ in range(4)]) == 0.0
        gathering.observe([work()] * 4, 4, NOW, NOW + FORWARD_S)
