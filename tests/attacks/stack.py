"""The stack that is attacked: what `outrider up` starts, with its limits as they are, and an API key per client.

What is shared fairly is shared between keys, or without keys between addresses. Attacker and neighbour both come from
this machine here, so without keys they would be one client, whose own requests may delay each other. Whoever serves
several clients gives each its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.processes import Stack
from outrider.shared.api_keys import key_line, new_key
from tests.ports import server_port

_MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True)
class AttackedStack:
    """neighbour_key, attacker_key: what the two clients send."""

    state: StackState
    neighbour_key: str
    attacker_key: str


@contextmanager
def running_stack(run_dir: Path, num_drafters: int = 0) -> Iterator[AttackedStack]:
    neighbour_key, attacker_key = new_key(), new_key()
    keys_file = run_dir / "api-keys"
    keys_file.write_text(f"{key_line('neighbour', neighbour_key)}\n{key_line('attacker', attacker_key)}\n")
    settings = StackSettings(
        model=str(_MODELS / "demo-target"),
        draft_model=str(_MODELS / "demo-draft"),
        port=server_port(),
        grpc_port=server_port(),
        num_drafters=num_drafters,
        gateway_args=("--api-keys-file", str(keys_file)),
    )
    stack = Stack(settings, run_dir, lambda _message: None, in_foreground=True)
    try:
        yield AttackedStack(stack.start(), neighbour_key, attacker_key)
    finally:
        stack.stop()
