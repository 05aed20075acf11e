"""What a forward costs by its rows: piecewise linear, never falling, and it follows the machine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.cpu_graphs import ROW_BUCKETS
from outrider.engine.run.runner import ModelRunner
from outrider.verifier_service.timing.step_costs import StepCosts, measure_step_costs, staircase

TABLES = st.lists(
    st.tuples(st.integers(1, 200), st.floats(1e-6, 1.0)), min_size=1, max_size=8, unique_by=lambda entry: entry[0]
).map(sorted)
Table = list[tuple[int, float]]


def rising(table: Table) -> tuple[list[int], list[float]]:
    rows, seconds = zip(*table, strict=True)
    return list(rows), list(np.maximum.accumulate(seconds))


def row_s(costs: StepCosts, num_rows: int) -> float:
    """What one more row adds to a forward of `num_rows` rows."""
    return costs.seconds(num_rows + 1) - costs.seconds(num_rows)


@settings(max_examples=200, deadline=None)
@given(TABLES, st.integers(1, 400))
def test_within_the_table_it_is_numpys_interpolation(table: Table, num_rows: int) -> None:
    rows, seconds = rising(table)
    costs = StepCosts(table)
    if rows[0] <= num_rows <= rows[-1]:
        assert costs.seconds(num_rows) == pytest.approx(np.interp(num_rows, rows, seconds))
    elif num_rows > rows[-1] and len(rows) > 1:
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        assert costs.seconds(num_rows) == pytest.approx(seconds[-1] + slope * (num_rows - rows[-1]))


@settings(max_examples=200, deadline=None)
@given(TABLES, st.integers(1, 400))
def test_a_further_row_never_makes_a_forward_cheaper(table: Table, num_rows: int) -> None:
    assert row_s(StepCosts(table), num_rows) >= 0.0


@pytest.mark.parametrize("factor", [0.25, 1.0, 6.0])
def test_it_follows_a_machine_that_has_become_slower_or_faster(factor: float) -> None:
    costs = StepCosts([(1, 0.01), (8, 0.012), (64, 0.04)])
    before = {rows: costs.seconds(rows) for rows in (1, 5, 64, 100)}
    for turn in range(150):
        rows = (1, 5, 64, 100)[turn % 4]
        costs.observe(rows, factor * before[rows])
    for rows, seconds in before.items():
        assert costs.seconds(rows) == pytest.approx(factor * seconds, rel=0.01)
    assert row_s(costs, 70) == pytest.approx(factor * 0.0005, rel=0.01)


@pytest.mark.parametrize(("disturbance_s", "steepness"), [(0.006, 1.0), (0.0, 1.7), (0.004, 0.6)])
def test_it_tells_what_all_forwards_take_longer_from_what_rows_do(disturbance_s: float, steepness: float) -> None:
    """Sixteen sessions beside other processes, with drafts and without."""
    table = [(1, 0.006), (16, 0.013), (32, 0.022), (48, 0.033)]
    costs, known = StepCosts(table), StepCosts(table)
    for turn in range(300):
        rows = (16, 15, 32, 16, 48)[turn % 5]
        costs.observe(rows, disturbance_s + steepness * known.seconds(rows))
    for rows in (16, 32, 48):
        assert costs.seconds(rows) == pytest.approx(disturbance_s + steepness * known.seconds(rows), rel=0.02)
    assert row_s(costs, 20) == pytest.approx(steepness * row_s(known, 20), rel=0.05)


def test_forwards_of_one_size_leave_the_price_of_a_row_alone() -> None:
    costs = StepCosts([(1, 0.006), (16, 0.013), (32, 0.022)])
    before = row_s(costs, 20)
    for _ in range(300):
        costs.observe(16, 0.020)
    assert costs.seconds(16) == pytest.approx(0.020, rel=0.01)
    assert row_s(costs, 20) == pytest.approx(before)


def test_what_sessions_cost_is_not_taken_for_the_price_of_rows() -> None:
    """Requests that come and go: two sessions without drafts, then eight with one or two tokens each."""
    table = [(1, 0.010), (8, 0.0105), (16, 0.0115), (24, 0.0155)]
    costs, known = StepCosts(table), StepCosts(table)
    for _ in range(6):
        for _ in range(60):
            costs.observe(2, known.seconds(2), num_sessions=2)
        for turn in range(60):
            rows = (16, 15, 24, 20, 16)[turn % 5]
            costs.observe(rows, 0.008 + known.seconds(rows), num_sessions=8)
            dearer = costs.seconds(24) - costs.seconds(8)
            assert dearer == pytest.approx(known.seconds(24) - known.seconds(8), rel=0.15)
    assert costs.seconds(24) == pytest.approx(0.008 + known.seconds(24), rel=0.02)
    costs.observe(2, known.seconds(2), num_sessions=2)
    assert costs.seconds(2) == pytest.approx(known.seconds(2), rel=0.02), "what two sessions take is still known"


def test_hiccups_of_large_forwards_leave_the_price_of_a_row_alone() -> None:
    table = [(1, 0.010), (16, 0.0115), (32, 0.0175)]
    costs, known, rng = StepCosts(table), StepCosts(table), np.random.default_rng(0)
    for turn in range(400):
        rows = (16, 16, 32, 16)[turn % 4]
        hiccup_s = 0.025 if turn % 40 == 38 else 0.0
        costs.observe(rows, known.seconds(rows) + hiccup_s + rng.normal(0.0, 0.0003), num_sessions=8)
        assert row_s(costs, 20) == pytest.approx(row_s(known, 20), rel=0.35)


def test_one_slow_forward_moves_it_little() -> None:
    costs = StepCosts([(1, 0.01), (64, 0.04)])
    costs.observe(1, 0.05)
    assert costs.seconds(1) == pytest.approx(0.012)


def test_a_table_of_one_entry_knows_no_price_of_rows() -> None:
    costs = StepCosts([(1, 0.01)])
    assert (costs.seconds(1), costs.seconds(50), row_s(costs, 50)) == (0.01, 0.01, 0.0)


def test_a_real_model_is_measured_over_as_many_rows_as_fit(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded, loaded.make_cache(10, 4))
    costs = measure_step_costs(runner, 10, 4)
    seconds = [costs.seconds(rows) for rows in range(1, 60)]
    assert seconds[0] > 0.0
    assert seconds == sorted(seconds)
    # 40 positions: as many rows are the last that were tried, and the slope from the size before goes on.
    assert row_s(costs, ROW_BUCKETS[ROW_BUCKETS.index(40) - 1]) == pytest.approx(row_s(costs, 500), abs=1e-12)


def test_padded_forwards_cost_what_the_next_measured_size_does() -> None:
    costs = StepCosts(staircase([(1, 0.010), (2, 0.010), (8, 0.011), (16, 0.012), (24, 0.017)]))
    assert [costs.seconds(rows) for rows in (1, 2, 3, 8, 9, 16, 17, 24)] == pytest.approx(
        [0.010, 0.010, 0.011, 0.011, 0.012, 0.012, 0.017, 0.017]
    )
    assert costs.seconds(32) == pytest.approx(0.022), "beyond what was measured the last slope goes on"
    assert costs.seconds(104) == pytest.approx(0.067)
    assert staircase([(1, 0.010)]) == [(1, 0.010)]


def test_recorded_forwards_cost_what_the_size_does_that_they_are_padded_to() -> None:
    loaded = load_model("models/demo-draft")
    runner = ModelRunner(loaded, loaded.make_cache(64, 4), graphs=True)
    assert runner.uses_graphs
    costs = measure_step_costs(runner, 64, 4)
    for size_before, size in itertools.pairwise(ROW_BUCKETS):
        assert costs.seconds(size_before + 1) == costs.seconds(size)


@settings(max_examples=200, deadline=None)
@given(TABLES, st.floats(1e-7, 3.0), st.integers(1, 300))
def test_rows_within_a_time_are_the_most_that_fit(table: Table, seconds: float, max_rows: int) -> None:
    costs = StepCosts(table)
    fitting = [num_rows for num_rows in range(1, max_rows + 1) if costs.seconds(num_rows) <= seconds]
    assert costs.rows_within(seconds, max_rows) == len(fitting)
