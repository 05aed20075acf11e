"""A whole stack as processes, and what the tests look at from outside: fleet info, metrics, process ids."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.client.stack.commands import StackSettings, StackState, drafter_command, verifier_command
from outrider.client.stack.processes import Stack
from outrider.shared import wire
from outrider.shared.messages import DrafterInfo, VerifierInfo
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.e2e.e2e_pace import FEW_AHEAD, paced
from tests.ports import server_port
from tests.redis_server import RedisServer

MODELS = Path(__file__).parents[2] / "models"
DEMO_TARGET = MODELS / "demo-target"
DEMO_DRAFT = MODELS / "demo-draft"
METHODS = ("draft_model", "ngram")
# A machine that is busy otherwise must not turn a late draft into no draft.
PATIENT = ("--draft-timeout-ms", "20000")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held; fails the test when it does not within `timeout_s`."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - started


def metric_of(url: str, name: str, **labels: str) -> float:
    """A sample of the gateway's /metrics, 0 when it is not there yet."""
    text = httpx.get(f"{url}/metrics", timeout=20).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return 0.0


class RunningStack:
    """One verifier, one drafter or none, a gateway and a Redis of their own; `revive` starts killed services anew."""

    def __init__(self, state: StackState, settings: StackSettings, run_dir: Path) -> None:
        self.state = state
        self.settings = settings
        self._run_dir = run_dir
        self._replacements: list[subprocess.Popen[bytes]] = []
        self._pids = dict(state.pids)
        self._killed: list[str] = []
        # A lost peer must be found again at once, not after gRPC's default back-off of seconds.
        options = [("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]
        self._verifier_channel = grpc.insecure_channel(state.verifiers[0], options)
        drafter = state.drafters[0] if state.drafters else "127.0.0.1:1"
        self._drafter_channel = grpc.insecure_channel(drafter, options)

    @property
    def url(self) -> str:
        return self.state.url

    def verifier_info(self) -> VerifierInfo:
        stub = verifier_pb2_grpc.VerifierStub(self._verifier_channel)
        return wire.verifier_info_from_wire(stub.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=20))

    def drafter_info(self) -> DrafterInfo:
        stub = drafter_pb2_grpc.DrafterStub(self._drafter_channel)
        return wire.drafter_info_from_wire(stub.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=20))

    def num_sessions(self) -> tuple[int, int]:
        """At the verifier, at the drafter."""
        at_drafter = self.drafter_info().num_sessions if self.state.drafters else 0
        return self.verifier_info().num_sessions, at_drafter

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: self.num_sessions() == (0, 0), timeout_s, "both services are idle")

    def metric(self, name: str, **labels: str) -> float:
        return metric_of(self.url, name, **labels)

    def signal(self, name: str, signum: int) -> None:
        os.kill(self._pids[name], signum)

    def kill(self, name: str) -> None:
        """SIGKILL to "verifier" or "drafter-0"."""
        self.signal(name, signal.SIGKILL)
        self._killed.append(name)

    def revive(self) -> None:
        """Starts what was killed again, on its old port, and returns at once."""
        while self._killed:
            self._start_again(self._killed.pop())

    def _start_again(self, name: str) -> None:
        if name == "verifier":
            command, address = verifier_command(self.settings), self.state.verifiers[0]
        else:
            command, address = drafter_command(self.settings), self.state.drafters[0]
        with (self._run_dir / f"{name}-again.log").open("wb") as log_file:
            process = subprocess.Popen(
                [*command, "--port", _port(address)],  # the last one counts
                stdout=log_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self._replacements.append(process)
        self._pids[name] = process.pid

    def wait_fleet(self, timeout_s: float = 150.0) -> None:
        """Until the gateway sees a verifier, and a drafter where there is one."""
        for service in ("verifier", "drafter") if self.state.drafters else ("verifier",):
            wait_until(
                lambda service=service: self.metric("outrider:fleet_members", service=service) == 1,  # type: ignore[misc]
                timeout_s,
                f"the gateway sees a {service}",
            )

    def close(self) -> None:
        self._verifier_channel.close()
        self._drafter_channel.close()
        for process in self._replacements:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _port(address: str) -> str:
    return address.rpartition(":")[2]


@contextmanager
def run_stack(
    run_dir: Path,
    *,
    dtype: str,
    draft_model: Path | str | None,
    methods: tuple[str, ...] = METHODS,
    speculative_config: str = "",
    gateway_args: tuple[str, ...] = PATIENT,
    is_paced: bool = False,
    num_drafters: int = 1,
    model: Path = DEMO_TARGET,
    start_timeout_s: float = 300.0,
) -> Iterator[RunningStack]:
    """is_paced: for tests that disturb streams (e2e_pace.py). num_drafters 0: the verifier drafts by itself.
    draft_model: several comma-separated.
    """
    with ExitStack() as around:
        redis_url = ""
        if is_paced:
            redis_dir = run_dir / "redis-data"
            redis_dir.mkdir(parents=True)
            redis_url = around.enter_context(paced(around.enter_context(RedisServer(redis_dir)).port))
            gateway_args += FEW_AHEAD
        settings = StackSettings(
            model=str(model),
            draft_model=str(draft_model or ""),
            methods=methods,
            port=0,
            grpc_port=server_port(),
            redis_url=redis_url,
            num_drafters=num_drafters,
            dtype=dtype,
            speculative_config=speculative_config,
            gateway_args=gateway_args,
            start_timeout_s=start_timeout_s,
        )
        stack = Stack(settings, run_dir, lambda _message: None)
        running = RunningStack(stack.start(), settings, run_dir)
        try:
            yield running
        finally:
            running.close()
            stack.stop()
