"""A short storm with every run of the tests; `python -m tests.chaos` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.run import Load, run_chaos

pytestmark = pytest.mark.timeout(900)


async def test_no_byte_changes_in_a_storm(tmp_path: Path) -> None:
    async with Fleet(tmp_path, num_gateways=2, num_drafters=2, num_verifiers=2) as fleet:
        load = Load(num_requests=60, num_at_once=10, num_tokens=64, mean_pause_s=1.0, seed=3)
        report = await run_chaos(fleet, load)
    assert report.mismatches == []
    assert report.failures == []
    assert report.leftovers == []
    assert sum(report.misfortunes.values()) >= 5
    assert report.num_reconnects > 0
