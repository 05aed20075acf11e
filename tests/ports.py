"""Ports of 127.0.0.1 that nobody else takes between the choice and the use: they stay bound while this process lives.

A port that is only asked for and let go may be anybody's by the time a server has loaded its model.
"""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def server_port() -> int:
    """For a server that binds it with SO_REUSEADDR, as all of ours do; until it listens, who connects is refused."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _hold(holder)


def stack_ports() -> tuple[int, tuple[str, ...]]:
    """Returns the HTTP port and the words that give `outrider up` both: the port after it, gRPC's, may be anybody's."""
    port = server_port()
    return port, ("--port", str(port), "--grpc-port", str(server_port()))


def nobodys_port() -> int:
    """Where nobody listens, now and later."""
    return _hold(socket.socket())


def _hold(holder: socket.socket) -> int:
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    port: int = holder.getsockname()[1]
    return port
