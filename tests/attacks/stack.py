"""The stack that is attacked: what `outrider up` starts, with its limits as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.processes import Stack
from tests.ports import server_port

_MODELS = Path(__file__).parents[2] / "models"


@contextmanager
def running_stack(run_dir: Path) -> Iterator[StackState]:
    settings = StackSettings(
        model=str(_MODELS / "demo-target"),
        draft_model=str(_MODELS / "demo-draft"),
        port=server_port(),
        grpc_port=server_port(),
    )
    stack = Stack(settings, run_dir, lambda _message: None)
    try:
        yield stack.start()
    finally:
        stack.stop()
