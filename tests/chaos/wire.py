"""A wire in user space between two interfaces: every frame arrives late, or not at all.

For kernels without `tc netem`. Run where the interfaces are:
`ip netns exec HUB python -m tests.chaos.wire PORT FAR --delay-ms 40 --loss-percent 2`. Not here: who lays the wire
(network.py).
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import select
import socket
import time

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET = 263
# Frames come and go with the header that says which checksums and cuts are still to be done.
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_LARGEST = 1 << 17


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("interfaces", nargs=2)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loss-percent", type=float, default=0.0)
    arguments = parser.parse_args()
    near, far = map(_open, arguments.interfaces)
    forward({near: far, far: near}, arguments.delay_ms / 1000, arguments.loss_percent / 100)


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.bind((interface, _ALL_PROTOCOLS))
    end.setblocking(False)
    return end


def forward(other: dict[socket.socket, socket.socket], delay_s: float, loss: float) -> None:
    """Until the process is killed."""
    rng = random.Random(0)
    order = itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(list(other), [], [], timeout_s)[0]:
            frame = end.recv(_LARGEST)
            if rng.random() >= loss:
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # an interface that is down loses frames, as a real one does
                end.send(frame)


if __name__ == "__main__":
    main()
