"""The containers of docker-compose.yml under a project name and ports of their own, and `docker compose kill` on them.

Needs a Docker engine with Compose v2 and images that are built (`docker compose build`). Not here: the containers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from outrider.client.stack.processes import free_port
from tests.chaos.faults import Fault

_ROOT = Path(__file__).parents[2]
_OVERRIDE = Path(__file__).parent / "compose-patient.yml"
_PROJECT = "outrider-chaos"
_SERVICES = ("gateway", "drafter", "verifier", "redis")
_NUM_DRAFTERS = 2
_START_TIMEOUT_S = 600.0


class ComposeUnavailable(Exception):
    """There is no Docker engine here, or it does not do what it is asked. The message has its words."""


class ComposeStack:
    """`async with` brings it up and takes it down again, volumes included."""

    def __init__(self) -> None:
        self._port = free_port()
        self._environment = {
            **os.environ,
            "OUTRIDER_PORT": str(self._port),
            "OUTRIDER_GRPC_PORT": str(free_port()),
            "VERIFIER_THREADS": "1",
        }

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self._port}"]

    async def __aenter__(self) -> ComposeStack:
        if shutil.which("docker") is None:
            raise ComposeUnavailable("docker is not on the PATH")
        try:
            await self._up(*_SERVICES)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._compose("down", "--volumes", "--timeout", "5")

    def faults(self) -> Sequence[Fault]:
        """Every service, killed with all of its containers and brought up again."""
        return [self._killed(service) for service in ("drafter", "verifier", "gateway", "redis")]

    def _killed(self, service: str) -> Fault:
        async def strike() -> None:
            await self._compose("kill", service)
            await self._up(service)

        return Fault(f"docker compose kill {service}", strike)

    async def _up(self, *services: str) -> None:
        scale = ("--scale", f"drafter={_NUM_DRAFTERS}") if "drafter" in services else ()
        await self._compose("up", "--detach", "--no-deps", *scale, *services)
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await asyncio.to_thread(self._is_ready):  # noqa: ASYNC110 only asking tells
                await asyncio.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.urls[0]}/ready", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    async def _compose(self, *arguments: str) -> None:
        files = ("--file", str(_ROOT / "docker-compose.yml"), "--file", str(_OVERRIDE))
        command = ["docker", "compose", "--project-name", _PROJECT, "--project-directory", str(_ROOT), *files]
        done = await asyncio.to_thread(
            subprocess.run, [*command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ComposeUnavailable(f"docker compose {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
