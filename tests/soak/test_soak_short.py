"""A little of the soak; `make soak` is the long one.

In so little time allocators still find their size, labels of what happens seldom still come, and p99 is a handful of
answers: memory and metric series have coarser limits, latency none. What is left: wrong answers, sessions, KV blocks
and keys that stay, descriptors and threads.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.soak.fleet import SoakFleet
from tests.soak.requests import KINDS
from tests.soak.run import Plan, run_soak
from tests.soak.verdict import Limits

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]


async def test_nothing_is_held_and_nothing_grows(tmp_path: Path) -> None:
    limits = Limits(memory_share=0.25, series_share=0.25, latency_ratio=math.inf)
    plan = Plan(seconds=26.0, num_clients=12, sample_s=1.0, idle_s=8.0, warm_up_s=5.0, seed=1, limits=limits)
    async with SoakFleet(tmp_path, num_drafters=1, session_ttl_s=4) as fleet:
        report = await run_soak(fleet, plan)
    assert report.violations() == []
    assert set(report.tally.counts) == {kind.__name__ for kind in KINDS}
    assert report.num_stops >= 2
