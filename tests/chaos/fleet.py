"""Gateways, drafters, verifiers and Redis as processes on fixed ports, each to be killed, paused and started again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc.aio

from outrider.shared import rpc, wire
from outrider.shared.messages import DrafterInfo, VerifierInfo
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.chaos.proxy import Proxy
from tests.chaos.targets import Target, demo
from tests.ports import server_port
from tests.redis_server import RedisServer

START_TIMEOUT_S = 300.0
# Long enough for another verifier to load on a machine where everything else loads as well.
FAILOVER_S = "240"


@dataclass
class Part:
    """One process of the fleet; `host` and `port` are its own, whoever stands before it.

    prefix: a command that runs the process somewhere else, as `ip netns exec NAME`.
    """

    name: str
    port: int
    command: Sequence[str]
    log_path: Path
    host: str = "127.0.0.1"
    prefix: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    def start(self) -> None:
        with self.log_path.open("ab") as log_file:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", *self.command, "--host", self.host, "--port", str(self.port)],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    async def drain(self) -> None:
        """SIGTERM, as whoever scales down sends it: running sessions may finish, nothing new is taken."""
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            await asyncio.to_thread(process.wait)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)


class Fleet:
    """`async with` starts all of it and waits until every gateway is ready."""

    def __init__(
        self, run_dir: Path, *, num_gateways: int, num_drafters: int, num_verifiers: int, target: Target | None = None
    ) -> None:
        """target: the demo's if None."""
        self.target = target or demo(run_dir)
        self.redis = self._make_redis(run_dir)
        self.parts: dict[str, Part] = {}
        self.proxies: dict[str, Proxy] = {}
        self._run_dir = run_dir
        self._counts = {"verifier": num_verifiers, "drafter": num_drafters, "gateway": num_gateways}

    async def __aenter__(self) -> Self:
        self.redis.start()
        for kind in ("verifier", "drafter"):
            for index in range(self._counts[kind]):
                await self._expose(self._add(f"{kind}-{index}", self._service_command(kind, index)))
        for index in range(self._counts["gateway"]):
            self._add(f"gateway-{index}", self._gateway_command())
        try:
            for part in self.parts.values():
                part.start()
            await asyncio.gather(*(self.wait_serving(part) for part in self.parts.values()))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.kill()
        for proxy in self.proxies.values():
            await proxy.close()
        self.redis.stop()

    def of_kind(self, kind: str) -> list[Part]:
        return [part for part in self.parts.values() if part.kind == kind]

    @property
    def urls(self) -> list[str]:
        return [f"http://{part.host}:{part.port}" for part in self.of_kind("gateway")]

    async def wait_serving(self, part: Part) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if part.process is not None and part.process.poll() is not None:
                raise RuntimeError(f"{part.name} ended by itself: {part.log_path.read_text()[-2000:]}")
            if await self._serves(part):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{part.name} does not serve: {part.log_path.read_text()[-2000:]}")
            await asyncio.sleep(0.2)

    async def verifier_info(self, part: Part) -> VerifierInfo:
        async with rpc.open_channel(f"{part.host}:{part.port}") as channel:
            stub = verifier_pb2_grpc.VerifierStub(channel)
            return wire.verifier_info_from_wire(await stub.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=20))

    async def drafter_info(self, part: Part) -> DrafterInfo:
        async with rpc.open_channel(f"{part.host}:{part.port}") as channel:
            stub = drafter_pb2_grpc.DrafterStub(channel)
            return wire.drafter_info_from_wire(await stub.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=20))

    async def _serves(self, part: Part) -> bool:
        try:
            if part.kind == "gateway":
                _reader, writer = await asyncio.open_connection(part.host, part.port)
                writer.close()
                return True
            async with rpc.open_channel(f"{part.host}:{part.port}") as channel:
                return await rpc.is_serving(channel, 2.0)
        except (OSError, grpc.aio.AioRpcError):
            return False

    def _make_redis(self, run_dir: Path) -> RedisServer:
        return RedisServer(run_dir)

    async def _expose(self, part: Part) -> None:
        """Before the gateways are told where it is."""
        proxy = Proxy(part.port)
        await proxy.start()
        self.proxies[part.name] = proxy

    def _address(self, part: Part) -> str:
        return f"127.0.0.1:{self.proxies[part.name].port}"

    def _place(self, name: str) -> tuple[str, Sequence[str]]:
        """Host and prefix of a part."""
        return "127.0.0.1", ()

    def _add(self, name: str, command: Sequence[str]) -> Part:
        host, prefix = self._place(name)
        part = Part(name, server_port(), command, self._run_dir / f"{name}.log", host, prefix)
        self.parts[name] = part
        return part

    def _service_command(self, kind: str, index: int) -> list[str]:
        if kind == "drafter":
            return ["outrider.drafter_service", "--num-threads", "1", *self.target.drafter_args]
        arguments = self.target.verifier_args[index % len(self.target.verifier_args)]
        return ["outrider.verifier_service", "--model", str(self.target.model), "--num-threads", "1", *arguments]

    def _gateway_command(self) -> list[str]:
        addresses = {
            kind: ",".join(self._address(part) for part in self.of_kind(kind)) for kind in ("verifier", "drafter")
        }
        return [
            *("outrider.gateway", "--model", str(self.target.model), "--grpc-port", "-1"),
            *("--redis-url", self.redis.url),
            *("--verifiers", addresses["verifier"], "--drafters", addresses["drafter"]),
            *("--failover-s", FAILOVER_S, "--redis-patience-s", "60", "--tool-call-parser", "hermes"),
        ]
