"""A fleet whose drafters serve trained heads: two verifiers, two drafters, to be frozen or killed; a gateway, a Redis.

The demo's heads where models/ has them; else random ones in the same layouts, whose drafts are nearly all wrong.
Beside them a draft model with a vocabulary of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from e2e_gateways import Fleet, Gateway
from e2e_stack import DEMO_TARGET, MODELS, metric_of, wait_until

from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.drafting.other_vocabularies import renamed_demo_draft
from tests.grid.heads import HEADS, save_random_head
from tests.ports import server_port
from tests.redis_server import RedisServer

START_TIMEOUT_S = 150.0


def head_folders(folder: Path) -> dict[str, Path]:
    """Kind -> checkpoint for the demo target; random ones are written below `folder`."""
    found = {kind: MODELS / f"demo-{kind.replace('_', '-')}" for kind in HEADS}
    missing = [kind for kind, path in found.items() if not (path / "model.safetensors").is_file()]
    if missing:
        target = load_target_weights(DEMO_TARGET)
        for kind in missing:
            found[kind] = folder / kind
            save_random_head(kind, target, found[kind])
    return found


@dataclass
class HeadFleet:
    """`verifiers` and `drafters`: address -> process id."""

    gateway: Gateway
    verifiers: dict[str, int]
    drafters: dict[str, int]
    frozen: list[int] = field(default_factory=list)

    def members(self, service: str) -> dict[str, int]:
        return self.verifiers if service == "verifier" else self.drafters

    def num_sessions(self, service: str, address: str) -> int:
        with grpc.insecure_channel(address) as channel:
            if service == "verifier":
                verifier = verifier_pb2_grpc.VerifierStub(channel)
                return int(verifier.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=20).num_sessions)
            drafter = drafter_pb2_grpc.DrafterStub(channel)
            return int(drafter.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=20).num_sessions)

    def metric(self, name: str, **labels: str) -> float:
        return metric_of(self.gateway.url, name, **labels)

    def freeze(self, service: str, address: str) -> None:
        """The gateway sees one member less."""
        expected = len(self.members(service)) - 1
        os.kill(self.members(service)[address], signal.SIGSTOP)
        self.frozen.append(self.members(service)[address])
        self.wait_members(service, expected)

    def thaw(self, service: str, address: str) -> None:
        os.kill(self.members(service)[address], signal.SIGCONT)
        self.frozen.remove(self.members(service)[address])
        self.wait_members(service, len(self.members(service)))

    def kill(self, service: str, address: str) -> None:
        os.kill(self.members(service).pop(address), signal.SIGKILL)

    def wait_members(self, service: str, count: int) -> None:
        wait_until(
            lambda: self.metric("outrider:fleet_members", service=service) == count,
            START_TIMEOUT_S,
            f"the gateway sees {count} {service}s",
        )


@contextmanager
def run_head_fleet(run_dir: Path) -> Iterator[HeadFleet]:
    redis_dir = run_dir / "redis-data"
    redis_dir.mkdir()
    draft = renamed_demo_draft(run_dir / "renamed-draft", num_merges=2_000)
    with RedisServer(redis_dir) as redis:
        settings = StackSettings(
            model=str(DEMO_TARGET),
            draft_model=",".join(map(str, (*head_folders(run_dir / "heads").values(), draft))),
            methods=(*HEADS, "draft_model"),
            port=0,
            grpc_port=server_port(),
            redis_url=redis.url,
            num_drafters=2,
        )
        second_address = f"127.0.0.1:{server_port()}"
        with _second_verifier(second_address, run_dir) as second:
            stack = Stack(settings, run_dir, lambda _message: None)
            # That another member is there is seen within some seconds; no stream may have ended by then.
            fleet = Fleet(stack.start(), redis, run_dir, pause_s=0.03)
            pids = fleet.state.pids
            verifiers = {fleet.state.verifiers[0]: pids["verifier"], second_address: second.pid}
            drafters = dict(zip(fleet.state.drafters, (pids["drafter-0"], pids["drafter-1"]), strict=True))
            fleet.state.verifiers.append(second_address)
            heads = HeadFleet(
                # Patient: a machine that is busy otherwise must not turn a late draft into no draft.
                fleet.gateway(draft_timeout_ms="20000", failover_s="150"),
                verifiers,
                drafters,
            )
            try:
                for service in ("verifier", "drafter"):
                    heads.wait_members(service, 2)
                yield heads
            finally:
                for pid in heads.frozen:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                fleet.close()
                stack.stop()


@contextmanager
def _second_verifier(address: str, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Started before the stack, so that both load at the same time."""
    with (run_dir / "verifier-2.log").open("wb") as log_file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "outrider.verifier_service",
                "--model",
                str(DEMO_TARGET),
                "--port",
                address.split(":")[1],
            ],
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
