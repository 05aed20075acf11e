"""A short storm; `python -m tests.chaos` is the long one, also with heads that are swapped (--target swapped)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.chaos.fleet import Fleet
from tests.chaos.load import Load
from tests.chaos.run import run_chaos
from tests.chaos.targets import TARGETS

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["demo", "hybrid"])
async def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Every part of it runs; a test that ends one starts it again."""
    run_dir = tmp_path_factory.mktemp("fleet")
    target = TARGETS[request.param](run_dir)
    async with Fleet(run_dir, num_gateways=2, num_drafters=2, num_verifiers=2, target=target) as running:
        yield running


async def test_no_byte_changes_in_a_storm(fleet: Fleet) -> None:
    load = Load(num_requests=48, num_at_once=10, num_tokens=192, mean_pause_s=0.6, seed=3, methods=fleet.target.methods)
    report = await run_chaos(fleet, load)
    assert report.mismatches == []
    assert report.failures == []
    assert report.leftovers == []
    assert len(report.misfortunes) >= 8
    assert report.num_reconnects > 0
