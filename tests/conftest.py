"""Where no GPU is, triton interprets its kernels on the CPU. It reads the variable when it is imported: so, first.

And hypothesis is not to judge how fast a machine is, which may be busy otherwise. And files that share a stack share
an xdist worker. And garbage is not looked for among the half a million objects that the files' imports make.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.triton_interpreter import search_builtins_once

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from tests.redis_server import RedisServer

gc.disable()  # until pytest_collection_finish


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("hypothesis"):  # a machine that was lent for its GPU has none
    from hypothesis import HealthCheck, settings

    slow_is_fine = [HealthCheck.too_slow]
    settings.register_profile("unhurried", parent=settings(), deadline=None, suppress_health_check=slow_is_fine)
    settings.load_profile("unhurried")

# Which files share a session's stack. One that is missing here costs another start of it, no more.
SHARED_STACKS = {
    "client": ("test_bench", "test_cli_chat", "test_cli_status", "test_doctor"),
    "playground": ("test_reach", "test_reading", "test_trouble"),
    "e2e": (
        *("test_bad_grpc_input", "test_bad_rest_input", "test_client_api", "test_client_wheel", "test_examples"),
        *("test_openai_client", "test_rejection_law", "test_sampling_fields", "test_sessions_are_freed"),
        "test_speculation",
    ),
    "float32": ("test_default_method", "test_matches_transformers"),
    "fleet": ("test_client_resumes", "test_resume"),
}
_STACK_OF = {file: stack for stack, files in SHARED_STACKS.items() for file in files}


def pytest_collection_finish() -> None:
    search_builtins_once()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the storms that would start after OUTRIDER_STORMS_UNTIL, in seconds since the epoch."""
    until = float(os.environ.get("OUTRIDER_STORMS_UNTIL") or "inf")
    if item.get_closest_marker("storm") and time.time() > until:
        pytest.skip("the time for storms is over: `make test-storms` runs them all")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else what modules hold outlives the filters of warnings


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but that files which share a stack go to the same worker."""
    from xdist.scheduler import LoadFileScheduling

    class LoadStackScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return _STACK_OF.get(Path(file).stem, file)

    return LoadStackScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    from tests.redis_server import RedisServer

    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def redis_client(redis_server: RedisServer) -> AsyncIterator[aioredis.Redis]:
    """A connection past the code under test; it empties the server first."""
    import redis.asyncio as aioredis

    connection = aioredis.Redis.from_url(redis_server.url)
    await connection.flushall()
    yield connection
    await connection.aclose()
