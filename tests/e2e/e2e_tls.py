"""A stack whose every connection is encrypted and whose every peer shows a certificate; Redis apart."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.certificates import Authority, Issued
from tests.ports import server_port
from tests.redis_server import RedisServer

MODELS = Path(__file__).parents[2] / "models"
START_TIMEOUT_S = 120.0
_SERVING = re.compile(r"serving on (\S+):(\d+)")


@dataclass
class TlsStack:
    """`fleet` signs for gateway, verifier and drafter; `public` for the gateway's servers and its clients."""

    folder: Path
    fleet: Authority
    public: Authority
    redis_url: str
    verifier_port: int = 0
    drafter_port: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *arguments: str) -> int:
        """Port of a service that serves now."""
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-m", *arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := _SERVING.search(log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not serve: {log.read_text()}")
            time.sleep(0.05)
        return int(found[2])

    def start_gateway(self, name: str, *arguments: str) -> tuple[int, int]:
        """HTTP and gRPC port of a gateway; it reaches the fleet by name, as in containers."""
        grpc_port = server_port()
        port = self.start(
            name,
            *("outrider.gateway", "--model", str(MODELS / "demo-target"), "--redis-url", self.redis_url, "--port", "0"),
            *("--grpc-port", str(grpc_port), "--verifiers", f"localhost:{self.verifier_port}"),
            *("--drafters", f"localhost:{self.drafter_port}", *arguments),
        )
        return port, grpc_port


def server_flags(issued: Issued, authority: Authority) -> tuple[str, ...]:
    """Mutual TLS."""
    files = ("--tls-cert-file", issued.cert_file, "--tls-key-file", issued.key_file)
    return (*files, "--tls-ca-file", authority.ca_file)


def fleet_flags(issued: Issued, authority: Authority) -> tuple[str, ...]:
    files = ("--fleet-tls-cert-file", issued.cert_file, "--fleet-tls-key-file", issued.key_file)
    return (*files, "--fleet-tls-ca-file", authority.ca_file)


@contextmanager
def run_tls_fleet(folder: Path) -> Iterator[TlsStack]:
    """Redis, a verifier without reflection and a drafter; gateways are for the test to start."""
    with RedisServer(folder) as redis:
        stack = TlsStack(folder, Authority(folder, "fleet"), Authority(folder, "public"), redis.url)
        member = stack.fleet.issue("member", dns_names=("localhost",))
        mutual = server_flags(member, stack.fleet)
        try:
            verifier = ("outrider.verifier_service", "--model", str(MODELS / "demo-target"), "--port", "0")
            stack.verifier_port = stack.start("verifier", *verifier, "--no-reflection", *mutual)
            stack.drafter_port = stack.start(
                "drafter", "outrider.drafter_service", "--methods", "ngram", "--port", "0", *mutual
            )
            yield stack
        finally:
            for process in reversed(stack.processes):
                process.terminate()
            for process in stack.processes:
                process.wait(30)
