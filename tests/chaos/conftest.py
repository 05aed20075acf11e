"""A fleet for each file: what a storm left behind must not be laid to what comes after it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.chaos.fleet import Fleet


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Every part of it runs; a test that ends one starts it again."""
    run_dir = tmp_path_factory.mktemp("fleet")
    async with Fleet(run_dir, num_gateways=2, num_drafters=2, num_verifiers=2) as running:
        yield running
