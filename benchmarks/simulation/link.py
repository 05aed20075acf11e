"""A TCP link between two services that makes everything late by a chosen time, and counts the bytes.

    with DelayedLink() as link:
        address = link.start("127.0.0.1:7002")   # what connects there is connected to the service
        link.set_delay(rtt_s=0.02, jitter=0.5)

A process of its own: what it delays must not wait for Python's lock in the process that measures. Bytes are never
reordered; what arrives while something is under way is under way beside it, as on a wire, not after it. Not here:
losses and cuts (tests/chaos).
"""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Self

_CHUNK = 64 * 1024
_STDIN = 0


class DelayedLink:
    """`start` it before the service that is to be reached through it connects; ends with the `with`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process is not None:
            self._process.communicate()  # the end of its input ends it

    def start(self, target: str) -> str:
        """Address that leads to `target`, both host:port."""
        command = [sys.executable, "-m", "benchmarks.simulation.link", target]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._ask("")

    def set_delay(self, rtt_s: float, jitter: float = 0.0) -> None:
        """Makes each way take half of the delay from now on, times something between 1 - jitter and 1 + jitter."""
        self._ask(f"{rtt_s} {jitter}\n")

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Returns the bytes to the service and back since the start."""
        forth, back = self._ask("bytes\n").split()
        return int(forth), int(back)

    def _ask(self, line: str) -> str:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the link has not been started")
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline().strip()
        if not answer:
            raise RuntimeError("the link's process has ended")
        return answer


@dataclass(eq=False)
class _Direction:
    """A link's direction, from `source` to `sink`. ready: pieces that are due, not sent; an empty one is the end."""

    source: socket.socket
    sink: socket.socket
    num_bytes: list[int]
    due: float = 0.0
    ready: deque[bytes] = field(default_factory=deque)
    has_ended: bool = False


class _Wire:
    def __init__(self, host: str, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._target = (host, port)
        self._rng = random.Random(0)
        self._rtt_s = self._jitter = 0.0
        self._num_bytes = ([0], [0])
        self._directions: list[_Direction] = []
        self._under_way: list[tuple[float, int, _Direction, bytes]] = []
        self._num_pieces = 0

    def serve(self) -> None:
        """Until the input ends."""
        while True:
            sources = {direction.source: direction for direction in self._directions if not direction.has_ended}
            blocked = {direction.sink: direction for direction in self._directions if direction.ready}
            timeout_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ends: list[socket.socket | int] = [_STDIN, self.listener, *sources]
            readable, writable, _ = select.select(ends, list(blocked), [], timeout_s)
            if _STDIN in readable and not self._obey():
                return
            if self.listener in readable:
                self._connect()
            for source in sources.keys() & set(readable):
                self._take(sources[source])
            self._deliver()
            for end in writable:
                self._send(blocked[end])

    def _obey(self) -> bool:
        lines = os.read(_STDIN, 1024).decode().splitlines()
        for line in lines:
            if line == "bytes":
                print(*self._num_bytes[0], *self._num_bytes[1], flush=True)
            else:
                self._rtt_s, self._jitter = map(float, line.split())
                print("set", flush=True)
        return bool(lines)

    def _connect(self) -> None:
        near, _ = self.listener.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forth, back = self._num_bytes
        self._directions += [_Direction(near, far, forth), _Direction(far, near, back)]

    def _take(self, direction: _Direction) -> None:
        try:
            piece = direction.source.recv(_CHUNK)
        except OSError:
            piece = b""
        direction.has_ended = not piece
        direction.num_bytes[0] += len(piece)
        one_way_s = 0.5 * self._rtt_s * self._rng.uniform(1.0 - self._jitter, 1.0 + self._jitter)
        direction.due = max(direction.due, time.monotonic() + one_way_s)
        self._num_pieces += 1
        heapq.heappush(self._under_way, (direction.due, self._num_pieces, direction, piece))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, direction, piece = heapq.heappop(self._under_way)
            direction.ready.append(piece)
            self._send(direction)

    def _send(self, direction: _Direction) -> None:
        """Sends as much as the sink takes now. Sockets close when both of their directions have ended."""
        while direction.ready:
            piece = direction.ready[0]
            try:
                if not piece:
                    direction.sink.shutdown(socket.SHUT_WR)
                sent = direction.sink.send(piece) if piece else 0
            except BlockingIOError:
                return
            except OSError:
                direction.ready.clear()  # the sink is gone: its own end comes the other way
                return
            direction.ready[0] = piece[sent:]
            if sent == len(piece):
                direction.ready.popleft()
            if not piece:
                self._directions.remove(direction)


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    wire = _Wire(host, int(port))
    print(f"127.0.0.1:{wire.listener.getsockname()[1]}", flush=True)
    wire.serve()


if __name__ == "__main__":
    main()
