"""Scaling while serving, short; `python -m tests.chaos --scale` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.load import Load
from tests.chaos.scaling import SCHEDULE, run_scaling

pytestmark = pytest.mark.timeout(900)


async def test_drafters_come_and_go_and_no_request_notices(tmp_path: Path) -> None:
    async with Fleet(tmp_path, num_gateways=1, num_drafters=max(SCHEDULE), num_verifiers=1) as fleet:
        load = Load(num_requests=12, num_at_once=6, num_tokens=96, mean_pause_s=0.0, seed=4)
        phases, held = await run_scaling(fleet, load)
    assert [phase.num_drafters for phase in phases] == list(SCHEDULE)
    for phase in phases:
        assert phase.report.mismatches == []
        assert phase.report.failures == []
        assert phase.report.num_reconnects == 0
        assert (phase.most_draft_sessions > 0) == (phase.num_drafters > 0)
    assert held == []
