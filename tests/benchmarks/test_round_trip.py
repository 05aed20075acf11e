"""The round-trip benchmark's arithmetic, and one small real stack behind links: delays, bytes and recorded costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.load import Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.round_trip import Cell, Plan, _cell, compare, merged
from benchmarks.simulation.fleet import Arrivals, Scenario, simulate
from benchmarks.simulation.probes import Forward, VerifyProbe
from benchmarks.simulation.record import medians_near, per_session_s_of, record
from benchmarks.simulation.stack import METHOD, MeasuredStack, measured_stack, plain
from outrider.verifier_service.timing.step_costs import StepCosts

pytestmark = pytest.mark.storm

MODELS = Path(__file__).parents[2] / "models"
OFF = Cell(0, 0, "off", 0, 48.0, 96, 90, 1.0, 0.02, 0.0, 0.0, 0.0, 0.02, 0.03)
DRAFT = Cell(0, 0, "draft 5", 5, 120.0, 96, 30, 3.0, 0.026, 1.0, 0.0, 0.005, 0.0205, 0.03)


def test_the_formula_is_fed_with_the_costs_without_delay() -> None:
    """S = E / (1 + n c + r): 3 tokens, 5 ms of drafting and 20 ms of way at 20 ms a plain round."""
    far = replace(DRAFT, rtt_ms=20.0, round_s=0.046)
    rows = compare([OFF, DRAFT, replace(OFF, rtt_ms=20.0), far])
    near_row, far_row = rows[1], rows[3]
    assert near_row["c"] == pytest.approx(0.05)
    assert near_row["expected"] == pytest.approx(3 / 1.25)
    # The round took 1 ms more than forward and drafting.
    assert near_row["expected_with_excess"] == pytest.approx(near_row["speedup"]) == pytest.approx(3 / 1.3)
    assert far_row["expected"] == pytest.approx(3 / 2.25)
    assert far_row["expected_with_excess"] == pytest.approx(far_row["speedup"]) == pytest.approx(3 / 2.3)
    assert far_row["of_off"] == pytest.approx(120 / 48)


def test_a_draft_that_was_asked_for_ahead_hides_the_way_or_the_verifier() -> None:
    """Whichever is shorter; not drafting itself, which takes the verifier's cores."""
    near_excess = 0.026 / 0.02 - 1.25
    for rtt_ms, hidden in ((5.0, 0.25), (20.0, 1.0), (40.0, 1.0)):
        far = replace(DRAFT, rtt_ms=rtt_ms, ahead_share=0.5)
        row = compare([OFF, DRAFT, replace(OFF, rtt_ms=rtt_ms), far])[3]
        round_length = 1.25 + rtt_ms / 20 - 0.5 * hidden
        assert row["expected"] == pytest.approx(3 / round_length)
        assert row["expected_with_excess"] == pytest.approx(3 / (round_length + near_excess))


def test_every_cell_is_compared_with_plain_decoding_under_its_own_condition() -> None:
    slow_off = replace(OFF, rtt_ms=1.0, jitter=0.5, tokens_per_s=24.0, round_s=0.04)
    rows = compare([OFF, DRAFT, slow_off, replace(DRAFT, rtt_ms=1.0, jitter=0.5)])
    assert rows[3]["of_off"] == pytest.approx(5.0)
    assert rows[1]["speedup"] == rows[3]["speedup"] == pytest.approx(3 / 0.026 * 0.03), "a plain round takes 20, 40 ms"


def test_figures_are_medians_over_the_rounds() -> None:
    rounds = [
        replace(DRAFT, tokens_per_s=rate, rounds=count, bytes_per_token={"drafter": rate / 10})
        for rate, count in ((100.0, 30), (150.0, 31), (110.0, 29), (90.0, 40))
    ]
    middle = merged(rounds)
    assert (middle.tokens_per_s, middle.rounds, middle.bytes_per_token) == (105.0, 30, {"drafter": 10.5})
    assert (middle.variant, middle.round_s) == (DRAFT.variant, DRAFT.round_s)


def test_auto_is_given_the_longest_draft() -> None:
    plan = Plan(((0.0, 0.0),), (2, 5), 1, 8)
    assert plan.variants()["auto"] == Shape(8, "auto", 5)
    assert plan.variants()["draft 2"] == Shape(8, METHOD, 2)


def test_batches_count_for_the_point_that_they_are_near() -> None:
    samples = [(1, 0.1), (15, 3.0), (16, 1.0), (17, 2.0), (12, 9.0), (32, 5.0)]
    assert medians_near(samples, (1, 16, 32)) == [(1, 0.1), (16, 2.0)]


def test_further_sessions_cost_what_rows_of_one_do_not_explain() -> None:
    step = StepCosts([(1, 0.010), (16, 0.025)])
    forwards = [Forward(1, 16, 9.0), Forward(4, 4, 0.013 + 3 * 0.002), Forward(16, 16, 0.025 + 15 * 0.003)]
    assert per_session_s_of(forwards, step) == pytest.approx(0.0025)
    assert per_session_s_of(forwards[:1], step) == 0.0


@pytest.fixture(scope="module")
def stack() -> Iterator[MeasuredStack]:
    """The demo pair as it is: nothing is claimed of its speed."""
    with measured_stack(MODELS / "demo-target", MODELS / "demo-draft", print, with_links=True) as stack:
        yield stack


def test_a_delay_before_the_drafter_is_in_every_round_with_a_draft(stack: MeasuredStack) -> None:
    prompts = code_prompts(2)
    asyncio.run(run_load(stack.state.url, prompts, Shape(8, METHOD, 4), 1))
    idle = {"verifier": 0.0, "drafter": 0.0}
    cells = {}
    for rtt_ms in (0.0, 120.0):
        stack.links["drafter"].set_delay(rtt_ms * 1e-3)
        for name, shape in (("off", plain(24)), ("draft 4", Shape(24, METHOD, 4))):
            cells[name, rtt_ms] = _cell(stack, rtt_ms, 0.0, name, shape, prompts, idle)
    stack.links["drafter"].set_delay(0.0)
    near, far = cells["draft 4", 0.0], cells["draft 4", 120.0]
    # A busy machine may miss a draft timeout; nothing makes a round with a draft shorter than its delay.
    assert near.drafted_share > 0.0 < far.drafted_share
    assert far.round_s >= 0.12 * far.drafted_share
    assert cells["off", 0.0].drafted_share == cells["off", 120.0].drafted_share == 0.0
    assert near.draft_s > 0.0 < near.forward_s
    assert near.round_tokens > 1.0
    # Asking, and as many draft tokens as come back: tens of bytes each way and token.
    assert near.bytes_per_token["drafter"] > 20.0 < near.bytes_per_token["verifier"]


def test_every_forward_counts_in_a_median(stack: MeasuredStack) -> None:
    async def measured() -> list[Forward]:
        async with VerifyProbe(stack.state.verifiers[0]) as probe:
            return await probe.forwards(1, 0, 40)

    assert len(asyncio.run(measured())) == 40  # two that took the same microseconds are two


def test_costs_that_are_recorded_can_be_simulated_with() -> None:
    costs = record(MODELS / "demo-target", MODELS / "demo-draft", num_prompts=1, max_tokens=48, repeats=3)
    rows = [rows for rows, _ in costs.verifier_step]
    assert rows == sorted(rows)
    assert rows[:4] == [1, 2, 4, 8]  # of one session; how many of several go together is the verifier's affair
    assert rows[-1] == 256
    assert all(seconds > 0.0 for _, seconds in costs.verifier_step)
    assert costs.draft_step[-1][1] > 0.0
    assert costs.host_round_s > 0.0
    assert costs.drafter_trip_s + costs.verifier_trip_s > 0.0  # what is left of a call: on a busy machine 0 for one
    assert costs.drafter_beside_verifier >= 1.0 <= costs.verifier_beside_drafter
    code = costs.domains["code"]
    assert len(code.accepted) == len(code.num_prompt_tokens) == 1
    assert max(code.accepted[0]) <= code.num_draft_tokens == 8
    assert 1.0 <= code.tokens_per_round(1) <= 2.0
    outcome = simulate(Scenario(1, 1, "fixed:4", 1.0, Arrivals.STREAMS, seconds=5.0), costs)
    assert outcome.tokens_per_s > 0.0
