"""The fleet with every process in a network namespace of its own; the client has one too.

with Network() as network:
    async with NetnsFleet(run_dir, network, num_gateways=2, num_drafters=2, num_verifiers=2) as fleet: ...
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import redis

from tests.chaos.fleet import START_TIMEOUT_S, Fleet, Part
from tests.chaos.network import Member, Network
from tests.chaos.targets import Target
from tests.redis_server import RedisServer

_REDIS_PORT = 6379


class NetnsFleet(Fleet):
    """Made inside the client's namespace: whoever makes it lives there from then on."""

    def __init__(
        self,
        run_dir: Path,
        network: Network,
        *,
        num_gateways: int,
        num_drafters: int,
        num_verifiers: int,
        target: Target | None = None,
    ) -> None:
        self.network = network
        network.enter(network.attach("client"))
        counts = {"num_gateways": num_gateways, "num_drafters": num_drafters, "num_verifiers": num_verifiers}
        super().__init__(run_dir, target=target, **counts)

    def member(self, name: str) -> Member:
        return self.network.members[name]

    def _make_redis(self, run_dir: Path) -> RedisServer:
        return _NetnsRedis(run_dir, self.network, self.network.attach("redis"))

    async def _expose(self, part: Part) -> None:
        """Reached as it is: the network is what stands between."""

    def _address(self, part: Part) -> str:
        return f"{part.host}:{part.port}"

    def _place(self, name: str) -> tuple[str, Sequence[str]]:
        member = self.network.attach(name)
        return member.address, self.network.prefix(member)


class _NetnsRedis(RedisServer):
    def __init__(self, directory: Path, network: Network, member: Member) -> None:
        super().__init__(directory)
        self._log = directory / "redis.log"
        self._command = [
            *network.prefix(member),
            *("redis-server", "--port", str(_REDIS_PORT), "--bind", member.address, "--protected-mode", "no"),
            *("--dir", str(directory), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
            *("--logfile", str(self._log)),
        ]
        self._address = member.address

    @property
    def url(self) -> str:
        return f"redis://{self._address}:{_REDIS_PORT}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with redis.Redis.from_url(self.url, socket_timeout=2.0) as client:
                    client.ping()
                return
            except redis.RedisError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = self._log.read_text() if self._log.exists() else "nothing"
                    raise RuntimeError(f"redis-server does not answer ({error}); it said: {said}") from error
                time.sleep(0.1)
