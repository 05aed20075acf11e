"""One stack for all tests of the commands that talk to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT

from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.processes import Stack
from tests.ports import server_port

MODELS = ROOT / "models"


@pytest.fixture(scope="session")
def run_dir_of_stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client-stack")


@pytest.fixture(scope="session")
def stack(run_dir_of_stack: Path) -> Iterator[StackState]:
    settings = StackSettings(
        str(MODELS / "demo-target"),
        str(MODELS / "demo-draft"),
        methods=("draft_model", "ngram"),
        port=0,
        grpc_port=server_port(),
    )
    running = Stack(settings, run_dir_of_stack, lambda _message: None)
    yield running.start()
    running.stop()
