"""A fleet of Outrider's, and one behind Dynamo's frontend: discovery by a folder, TCP between them, no etcd, no NATS.

Every part may be killed and started again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from tests.chaos.fleet import START_TIMEOUT_S, Fleet, Part
from tests.e2e.e2e_pace import FEW_AHEAD, paced
from tests.ports import server_port

MODEL = "demo"
# What a worker of Dynamo logs once requests can come.
_SERVES = "Registered endpoint"


@dataclass
class Program(Part):
    """A process with a command of its own, whose output says when it serves. Each start has a log of its own."""

    environment: tuple[tuple[str, str], ...] = ()
    num_starts: int = 0

    def start(self) -> None:
        self.num_starts += 1
        self.log_path = self.log_path.with_name(f"{self.name}.{self.num_starts}.log")
        with self.log_path.open("wb") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict(self.environment)},
            )


class PacedFleet(Fleet):
    """Verifiers and gateways of Outrider's, before a Redis whose pace makes streams long enough to be disturbed."""

    def __init__(self, run_dir: Path, *, num_gateways: int = 2, num_verifiers: int = 1) -> None:
        super().__init__(run_dir, num_gateways=num_gateways, num_drafters=0, num_verifiers=num_verifiers)
        self._around = ExitStack()
        self._paced_url = ""

    async def __aenter__(self) -> Self:
        self.redis.start()
        self._paced_url = self._around.enter_context(paced(self.redis.port))
        self.redis.stop()
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        self._around.close()

    def _gateway_command(self) -> list[str]:
        command = super()._gateway_command()
        command[command.index("--redis-url") + 1] = self._paced_url
        return [*command, *FEW_AHEAD]


class DynamoFleet(PacedFleet):
    """`async with` starts all of it and waits until Dynamo's frontend serves and every worker has registered."""

    def __init__(self, run_dir: Path, *, num_workers: int = 2, num_gateways: int = 2, num_verifiers: int = 1) -> None:
        super().__init__(run_dir, num_gateways=num_gateways, num_verifiers=num_verifiers)
        self._num_workers = num_workers
        self.frontend_url = ""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        port = server_port()
        self.frontend_url = f"http://127.0.0.1:{port}"
        await self.start_program(
            "frontend",
            *("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
            *("--discovery-backend", "file", "--migration-limit", "5"),
        )
        gateways = [word for url in self.urls for word in ("--gateway", url)]
        for index in range(self._num_workers):
            await self.start_program(
                f"worker-{index}",
                *("outrider.plugins.dynamo", *gateways, "--model", str(self.target.model)),
                *("--served-model-name", MODEL, "--discovery-backend", "file", "--dyn-tool-call-parser", "hermes"),
            )
        return self

    async def start_program(self, name: str, *command: str) -> None:
        environment = (("DYN_FILE_KV", str(self._run_dir / "discovery")), ("DYN_TCP_RPC_HOST", "127.0.0.1"))
        program = Program(name, 0, command, self._run_dir / name, environment=environment)
        self.parts[name] = program
        program.start()
        await self.wait_serving(program)

    async def _serves(self, part: Part) -> bool:
        if part.kind == "worker":
            return _SERVES in part.log_path.read_text(errors="replace")
        if part.kind == "frontend":
            async with httpx.AsyncClient() as client:
                try:
                    return (await client.get(f"{self.frontend_url}/health")).status_code == 200
                except httpx.HTTPError:
                    return False
        return await super()._serves(part)

    async def wait_ready(self) -> None:
        """Until the frontend has found the workers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        async with httpx.AsyncClient(timeout=60) as client:
            while (answer := await client.post(f"{self.frontend_url}/v1/completions", json=body)).status_code != 200:
                assert answer.status_code in (404, 503), answer.text
                assert time.monotonic() < deadline, answer.text
                await asyncio.sleep(0.2)
