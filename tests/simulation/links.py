"""Connections between simulated processes: messages arrive later, in order, or never.

A link is one TCP connection. Faults: a message is late, and all behind it (stall); the connection is reset, and both
ends are told; it is half-open: nothing arrives any more, and each end finds out by its keepalive, if it has one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulation.loop import Process, SimLoop

# seconds; one way
LATENCY_S = (0.0002, 0.005)
# seconds; until an end notices that nothing comes any more (shared/rpc.py: channels 10 + 5, servers 30 + 10)
CLIENT_NOTICES_S, SERVER_NOTICES_S = 15.0, 40.0
# seconds; apart, so that messages of one link stay in order
_APART_S = 1e-7


class Mischief(Protocol):
    """What goes wrong on links. Called for each message: the seconds that it is late; it may also harm the link."""

    def on_message(self, link: Link, what: object) -> float: ...


@dataclass
class End:
    """One end of a link. lost: called once when the connection is over for this end, unless it closed it itself."""

    process: Process
    notices_s: float
    is_open: bool = True
    last_arrival: float = 0.0
    lost: list[Callable[[], None]] = field(default_factory=list)


class Later:
    """A text that is made when somebody reads it, as of most seeds nobody does. What it is made of stays as it is."""

    __slots__ = ("_args", "_make")

    def __init__(self, make: Callable[..., str], *args: object) -> None:
        self._make, self._args = make, args

    def __str__(self) -> str:
        return self._make(*self._args)


@dataclass
class Trace:
    """All that happened."""

    loop: SimLoop
    _entries: list[tuple[float, int, tuple[object, ...]]] = field(default_factory=list)

    def add(self, *parts: object) -> None:
        self._entries.append((self.loop.time(), self.loop.num_steps, parts))

    @property
    def lines(self) -> list[str]:
        """What two runs of one seed have in common."""
        return [f"{now:11.6f} {step:7d} {' '.join(map(str, parts))}" for now, step, parts in self._entries]

    @property
    def digest(self) -> int:
        """Of what Python's versions have in common: not the number of steps, as asyncio takes some more or fewer."""
        return zlib.crc32(
            "".join(f"{now:11.6f} {' '.join(map(str, parts))}" for now, _, parts in self._entries).encode()
        )


class Link:
    """One connection from a client to a server."""

    def __init__(self, net: Network, client: Process, server: Process, kind: str) -> None:
        self.kind = kind
        self.num_messages = 0
        self.is_cut = False
        self.client, self.server = End(client, CLIENT_NOTICES_S), End(server, SERVER_NOTICES_S)
        self.net = net

    def __str__(self) -> str:
        return f"{self.client.process.name}->{self.server.process.name}/{self.kind}"

    def end(self, *, of_client: bool) -> End:
        return self.client if of_client else self.server

    def send(self, what: object, deliver: Callable[[], None], *, by_client: bool) -> None:
        """Sends a message: `deliver` is called at the other end. what: for the trace."""
        sender, receiver = (self.client, self.server) if by_client else (self.server, self.client)
        if not sender.is_open or sender.process.is_dead:
            return
        self.num_messages += 1
        late_s = self.net.mischief.on_message(self, what)
        arrival = max(self.net.loop.time() + self.net.latency_s() + late_s, receiver.last_arrival + _APART_S)
        receiver.last_arrival = arrival
        self.net.trace.add(">" if by_client else "<", self, what)
        self.net.later(arrival, lambda: self._arrive(receiver, deliver))

    def _arrive(self, receiver: End, deliver: Callable[[], None]) -> None:
        if self.is_cut or not receiver.is_open or receiver.process.is_dead:
            return

        def in_process() -> None:
            if receiver.is_open:
                deliver()

        self.net.loop.call_soon(in_process, context=receiver.process.main.context)

    def close(self, *, by_client: bool) -> None:
        """One end closes the connection; the other is told by a message."""
        mine, other = (self.client, self.server) if by_client else (self.server, self.client)
        if mine.is_open:
            mine.is_open = False
            self._tell(other, max(self.net.loop.time() + self.net.latency_s(), other.last_arrival + _APART_S))

    def reset(self) -> None:
        """Both ends are told; what is under way is lost."""
        self.net.trace.add(f"! reset {self}")
        self.is_cut = True
        for end in (self.client, self.server):
            self._lose_at(end, self.net.loop.time() + self.net.latency_s())

    def half_open(self) -> None:
        """Nothing arrives any more."""
        self.net.trace.add(f"! half-open {self}")
        self.is_cut = True
        for end in (self.client, self.server):
            self._lose_at(end, self.net.loop.time() + end.notices_s)

    def _tell(self, end: End, when: float) -> None:
        self.net.later(when, lambda: None if self.is_cut else self._lose_now(end))

    def _lose_at(self, end: End, when: float) -> None:
        self.net.later(when, lambda: self._lose_now(end))

    def _lose_now(self, end: End) -> None:
        if not end.process.is_dead:
            self.net.loop.call_soon(self.lose, end, context=end.process.main.context)

    def lose(self, end: End) -> None:
        if end.is_open:
            end.is_open = False
            lost, end.lost = end.lost, []
            for callback in lost:
                callback()


class Network:
    """All links. Processes are found by address. num_clipped: messages that an older process took fields from."""

    def __init__(self, loop: SimLoop, rng: random.Random, mischief: Mischief) -> None:
        self.loop = loop
        self.mischief = mischief
        self.trace = Trace(loop)
        self.servers: dict[str, object] = {}
        self.links: list[Link] = []
        self.num_clipped = 0
        self._rng = rng

    def latency_s(self) -> float:
        return self._rng.uniform(*LATENCY_S)

    def later(self, when: float, callback: Callable[[], None]) -> None:
        self.loop.call_at(when, callback, context=self.loop.outside.main.context)

    def connect(self, client: Process, server: Process, kind: str) -> Link:
        link = Link(self, client, server, kind)
        self.links = [other for other in self.links if other.client.is_open or other.server.is_open]
        self.links.append(link)
        return link

    def kill(self, process: Process, *, silently: bool = False) -> None:
        """The process ends at once. silently: its machine does, so that no end is told."""
        self.trace.add(f"! kill {process.name}")
        process.kill()
        for link in self.links:
            for end, other in ((link.client, link.server), (link.server, link.client)):
                if end.process is process and other.is_open:
                    if silently:
                        link.half_open()
                    else:
                        link.reset()

    def pause(self, process: Process) -> None:
        """The process stands still; whoever has a keepalive notices."""
        self.trace.add(f"! pause {process.name}")
        process.pause()
        for link in self.links:
            for end, other in ((link.client, link.server), (link.server, link.client)):
                if end.process is process and other.is_open:
                    self._notice(link, process, other)

    def _notice(self, link: Link, process: Process, other: End) -> None:
        since = process.paused_at

        def check() -> None:
            if process.is_paused and process.paused_at == since and other.is_open:
                link.reset()

        self.later(self.loop.time() + other.notices_s, check)

    def go_on(self, process: Process) -> None:
        self.trace.add(f"! go on {process.name}")
        process.go_on()
