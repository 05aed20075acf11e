"""Stacks of real processes (Redis, verifier, drafter, gateway), started once per run: 15 seconds each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from e2e_gateways import Fleet, run_fleet
from e2e_prompts import stdlib_prompts
from e2e_real_models import run_real_stack
from e2e_stack import DEMO_DRAFT, DEMO_TARGET, RunningStack, run_stack

# A machine that is busy otherwise must not fail a test; what is promised in seconds is asserted by itself.
HTTP_TIMEOUT_S = 120.0
# seconds; a model of half a billion parameters may have to be loaded again meanwhile
REAL_TIMEOUT_S = 1800.0


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The demo family as it is served by default (bfloat16), but for drafts that are waited for."""
    with run_stack(tmp_path_factory.mktemp("stack"), dtype="auto", draft_model=DEMO_DRAFT) as running:
        yield running


@pytest.fixture(scope="session")
def float32_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The same weights in float32; n-gram drafts of four tokens are its default."""
    config = '{"method": "ngram", "num-speculative-tokens": 4}'
    run_dir = tmp_path_factory.mktemp("float32-stack")
    with run_stack(run_dir, dtype="float32", draft_model=DEMO_DRAFT, speculative_config=config) as running:
        yield running


@pytest.fixture(scope="module")
def mortal_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """For tests that kill. The target drafts for itself, so drafts are accepted whatever the weights are.

    Loading another verifier takes 8 s on two idle cores and a minute on busy ones: sessions wait for it that long.
    """
    run_dir = tmp_path_factory.mktemp("mortal-stack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_FAILOVER_S", "150")
        # How long a draft is waited for is one of the things that are tested there: the default.
        with run_stack(run_dir, dtype="auto", draft_model=DEMO_TARGET, gateway_args=(), is_paced=True) as running:
            yield running


@pytest.fixture(scope="session")
def lasting_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """For tests that kill gateways of their own and nothing else."""
    with run_fleet(tmp_path_factory.mktemp("lasting-fleet")) as running:
        yield running


@pytest.fixture(scope="session")
def real_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A model that calls tools; skipped where its weights cannot be had."""
    with run_real_stack(tmp_path_factory.mktemp("real-stack")) as running:
        yield running


@pytest.fixture(scope="session")
async def real_http(real_stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=real_stack.url, timeout=REAL_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="session")
async def http(stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=HTTP_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="session")
async def float32_http(float32_stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=float32_stack.url, timeout=HTTP_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
async def mortal_http(mortal_stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mortal_stack.url, timeout=HTTP_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    return stdlib_prompts(DEMO_TARGET)
