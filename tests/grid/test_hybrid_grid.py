"""The grid on a target with recurrent layers: every drafter, chain and tree, in a crowd and preempted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.grid.cells import DRAFTERS, PARAMETERS, PREFILLS, SHAPES, Cell
from tests.grid.grid import Grid
from tests.grid.models import HYBRID_NAME, grid_model

pytestmark = [pytest.mark.storm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    grid = Grid(grid_model(HYBRID_NAME, tmp_path_factory.mktemp("models")))
    yield grid
    grid.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", ["evicted", "preempted"])
def test_every_drafter_at_once_and_no_output_changes(grid: Grid, shape: str, cache: str) -> None:
    axes = zip(DRAFTERS, itertools.cycle(PARAMETERS), itertools.cycle(PREFILLS))
    cells = [Cell(drafter, 3, shape, parameters, "eight", prefill, cache) for drafter, parameters, prefill in axes]
    report = grid.run([*cells, Cell("off_step", 0, "none", "t0.7", "eight", "whole", cache)])
    assert not report.mismatches, "\n".join(str(outcome) for outcome in report.mismatches)
    assert {outcome.cell.drafter for outcome in report.outcomes if outcome.num_draft_tokens} == set(DRAFTERS)
    assert sum(outcome.num_accepted_tokens for outcome in report.outcomes if outcome.cell.drafter == "oracle") > 0
    if cache == "preempted":
        assert report.num_preemptions > 0
