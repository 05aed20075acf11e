"""Starts what mostly waits when a run begins, so that nobody waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

_VANISHED_PEERS = pytest.StashKey["subprocess.Popen[str]"]()
_ROOT = Path(__file__).parents[2]


def pytest_collection_finish(session: pytest.Session) -> None:
    is_wanted = any("vanished_peers" in getattr(item, "fixturenames", ()) for item in session.items)
    if is_wanted and not session.testsfailed and not session.config.option.collectonly:
        session.config.stash[_VANISHED_PEERS] = subprocess.Popen(
            [sys.executable, "-m", "tests.shared.vanished_peers"], cwd=_ROOT, stderr=subprocess.PIPE, text=True
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    process = session.config.stash.get(_VANISHED_PEERS, None)
    if process is not None:
        process.send_signal(signal.SIGINT)  # it ends those that it has stopped
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # SIGINT came before it was listening
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def vanished_peers(request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    return request.config.stash[_VANISHED_PEERS]
