"""Rows for prompts while others decode: led by the times between pieces to where one in twenty is late."""

from __future__ import annotations

import random

import pytest

from outrider.verifier_service.scheduler import MIN_PROMPT_ROWS
from outrider.verifier_service.timing.prompt_allowance import PromptAllowance
from outrider.verifier_service.timing.step_costs import StepCosts

MAX_ROWS = 512
# 10 ms and a millisecond a row.
COSTS = StepCosts([(1, 0.011), (101, 0.111)])


def allowance(slo_itl_s: float = 0.06) -> PromptAllowance:
    return PromptAllowance(slo_itl_s, COSTS, MAX_ROWS)


def decode(prompts: PromptAllowance, seconds: list[float], away_s: float = 0.0) -> None:
    """One piece after another, each of a forward that reads prompts."""
    now = 1.0
    for forward_s in seconds:
        last_committed, asked = now, now + away_s
        now = asked + forward_s
        prompts.read_prompts(now)
        prompts.committed(last_committed, asked, now)


@pytest.mark.parametrize(("slo_itl_s", "expected"), [(0.06, 50), (0.005, MIN_PROMPT_ROWS), (10.0, MAX_ROWS)])
def test_it_begins_with_what_forwards_cost(slo_itl_s: float, expected: int) -> None:
    assert allowance(slo_itl_s).num_rows() == expected


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.01, 0.002), (0.01, 0.0005), (0.03, 0.001)])
def test_one_piece_in_twenty_is_late_whatever_forwards_cost_by_now(fixed_s: float, row_s: float) -> None:
    prompts, rng = allowance(), random.Random(1)
    late = []
    for _ in range(6000):
        forward_s = (fixed_s + row_s * prompts.num_rows()) * rng.uniform(0.7, 1.3)
        late.append(forward_s > 0.06)
        decode(prompts, [forward_s])
    assert sum(late[1000:]) / 5000 == pytest.approx(0.05, abs=0.02)


def test_time_at_the_drafter_counts() -> None:
    prompts = allowance()
    decode(prompts, [0.05] * 10, away_s=0.02)
    assert prompts.num_rows() < 50


def test_a_slow_reader_takes_nothing_from_prompts() -> None:
    prompts = allowance()
    decode(prompts, [0.025] * 10, away_s=30.0)
    assert prompts.num_rows() >= 50


def test_pieces_that_waited_for_no_prompt_change_nothing() -> None:
    prompts = allowance()
    prompts.read_prompts(1.0)
    for start in range(2, 40):
        prompts.committed(start - 1.0, start, start + 0.9)
    assert prompts.num_rows() == 50


def test_prompts_keep_a_few_rows_and_never_get_more_than_a_forward_has() -> None:
    prompts = allowance()
    decode(prompts, [1.0] * 100)
    assert prompts.num_rows() == MIN_PROMPT_ROWS
    decode(prompts, [0.001] * 2000)
    assert prompts.num_rows() == MAX_ROWS
