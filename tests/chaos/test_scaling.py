"""Scaling while serving, short; `python -m tests.chaos --scale` is the long one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.load import Load
from tests.chaos.scaling import run_scaling

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Of drafters as many as there will be, of the others one."""
    run_dir = tmp_path_factory.mktemp("fleet")
    async with Fleet(run_dir, num_gateways=1, num_drafters=2, num_verifiers=1) as running:
        yield running


async def test_drafters_come_and_go_and_no_request_notices(fleet: Fleet) -> None:
    """Up, to none, and up from none; at the end all run again."""
    schedule = (1, 2, 0, 2)
    load = Load(num_requests=8, num_at_once=6, num_tokens=96, mean_pause_s=0.0, seed=4)
    phases, held = await run_scaling(fleet, load, schedule)
    assert [phase.num_drafters for phase in phases] == list(schedule)
    for phase in phases:
        assert phase.report.mismatches == []
        assert phase.report.failures == []
        assert phase.report.num_reconnects == 0
        assert (phase.most_draft_sessions > 0) == (phase.num_drafters > 0)
    assert held == []
