"""One service as a process that can be killed, paused, and started again on its port."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from e2e_stack import DEMO_TARGET, wait_until

from outrider.shared import wire
from outrider.shared.messages import DrafterInfo, VerifierInfo
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.ports import server_port

# Loading takes 8 s on two idle cores and a minute on busy ones.
START_TIMEOUT_S = 150.0


class ServiceProcess:
    def __init__(self, module: str, run_dir: Path, *args: str) -> None:
        self._port = server_port()
        self._command = [sys.executable, "-m", module, "--port", str(self._port), *args]
        self._log_path = run_dir / f"{module}-{self._port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        with self._log_path.open("wb") as log_file:
            self._process = subprocess.Popen(
                self._command, stdout=log_file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def wait_serving(self) -> None:
        wait_until(lambda: "serving on" in self._log_path.read_text(), START_TIMEOUT_S, self._log_path.name)

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Nothing where it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def verifier_process(run_dir: Path, dtype: str) -> ServiceProcess:
    arguments = ("--model", str(DEMO_TARGET), "--dtype", dtype, "--num-threads", "1")
    return ServiceProcess("outrider.verifier_service", run_dir, *arguments)


def start_all(processes: Sequence[ServiceProcess]) -> None:
    """Returns when all of them serve."""
    for process in processes:
        process.start()
    for process in processes:
        process.wait_serving()


async def verifier_info(process: ServiceProcess) -> VerifierInfo:
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierStub(channel)
        return wire.verifier_info_from_wire(await stub.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=20))


async def drafter_info(process: ServiceProcess) -> DrafterInfo:
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub: Any = drafter_pb2_grpc.DrafterStub(channel)
        return wire.drafter_info_from_wire(await stub.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=20))
