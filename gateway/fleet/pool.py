"""Service discovery: a fleet's members, found by name, health-checked, chosen by load.

An address is host:port. A host name with several addresses (Docker Compose, a Kubernetes headless service) is several
members; names are resolved again continually, so members join and leave while requests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc.aio

from outrider.shared import rpc

log = logging.getLogger(__name__)

InfoT = TypeVar("InfoT")
FetchInfo = Callable[[grpc.aio.Channel, float], Awaitable[InfoT]]
# Arguments: the resolved address, and the host name before resolution, which the certificate must match.
OpenChannel = Callable[[str, str], grpc.aio.Channel]

# s; pause between two polls of a fleet; chosen: members join and leave within about a second
WATCH_INTERVAL_S = 1.0
# s; longest health check and GetInfo; chosen: a busy verifier answers within it
CHECK_TIMEOUT_S = 2.0


@dataclass
class Member(Generic[InfoT]):
    """One process of the fleet. num_sessions: this gateway's own sessions there."""

    address: str
    channel: grpc.aio.Channel
    info: InfoT | None = None
    healthy: bool = False
    num_sessions: int = field(default=0)


class Pool(Generic[InfoT]):
    """Polls one fleet in the background between `start` and `close`."""

    def __init__(
        self,
        service: str,
        addresses: Sequence[str],
        fetch_info: FetchInfo[InfoT],
        open_channel: OpenChannel | None = None,
    ) -> None:
        self._service = service
        self._addresses = tuple(addresses)
        self._fetch_info = fetch_info
        self._open_channel = open_channel or (lambda address, _name: rpc.open_channel(address))
        self._members: dict[str, Member[InfoT]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self.refresh()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch-{self._service}")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for member in self._members.values():
            await member.channel.close()

    @property
    def members(self) -> list[Member[InfoT]]:
        return list(self._members.values())

    @property
    def has_unseen(self) -> bool:
        """True if a member has not been reached since the start."""
        return any(member.info is None for member in self._members.values())

    def healthy(self) -> list[Member[InfoT]]:
        """Returns the members that answer, the least loaded first."""
        ready = [member for member in self._members.values() if member.healthy and member.info is not None]
        return sorted(ready, key=lambda member: member.num_sessions)

    def mark_lost(self, member: Member[InfoT]) -> None:
        """Removes a member until its next successful health check."""
        member.healthy = False

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns after the next poll of the fleet, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def look_again(self) -> None:
        """Polls the whole fleet now. Callers at the same time share one poll, which may have begun before."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.refresh(), name=f"look-{self._service}")
        await asyncio.shield(self._looking)

    async def refresh(self) -> None:
        """Polls the whole fleet once. Not for two callers at a time."""
        found = {address: name for name in self._addresses for address in await _resolve(name)}
        for address, name in found.items():
            if address not in self._members:
                host = name.rpartition(":")[0].strip("[]")
                self._members[address] = Member(address, self._open_channel(address, host))
        for address in self._members.keys() - found.keys():
            member = self._members[address]
            member.healthy = False
            if member.num_sessions == 0:
                del self._members[address]
                await member.channel.close()
        await asyncio.gather(*(self._check(self._members[address]) for address in found))
        self._changed.set()
        self._changed.clear()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                await self.look_again()
            except Exception:
                log.exception("polling the %s fleet failed; retrying", self._service)

    async def _check(self, member: Member[InfoT]) -> None:
        healthy = await rpc.is_serving(member.channel, CHECK_TIMEOUT_S)
        if healthy:
            try:
                member.info = await self._fetch_info(member.channel, CHECK_TIMEOUT_S)
            except grpc.RpcError as error:
                log.warning("%s %s serves but its GetInfo fails: %s", self._service, member.address, error)
                healthy = False
        if healthy != member.healthy:
            log.info("%s %s is %s", self._service, member.address, "healthy" if healthy else "gone")
        member.healthy = healthy


async def _resolve(name: str) -> list[str]:
    """Resolves host:port to every address of the host, in a stable order; [] while the name does not resolve."""
    host, _, port = name.rpartition(":")
    bare = host.strip("[]")
    try:
        ipaddress.ip_address(bare)
        return [name]
    except ValueError:
        pass
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = sorted({str(entry[4][0]) for entry in entries})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
