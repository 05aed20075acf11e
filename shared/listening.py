"""Ports to listen on, taken before anything is loaded: a busy one is found at once and named by its setting.

Not here: serving on them (rpc.py, uvicorn).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from outrider.shared.errors import ConfigError

_LAST_PORT = 2**16 - 1


@contextmanager
def held_port(host: str, port: int, setting: str) -> Iterator[None]:
    """Holds the port on every address of the host; who connects is refused meanwhile. 0 is any free port, -1 no
    server.

    A server may listen there at once after it. setting: the flag, for messages. Raises ConfigError.
    """
    with ExitStack() as held:
        if port >= 0:
            for holder in _bound(host, port, setting):
                held.enter_context(holder)
        yield


def _bound(host: str, port: int, setting: str) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise ConfigError(f"--host: {host} is not an address of this machine: {error.strerror}", param="host") from None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        holder = socket.socket(family, kind, protocol)
        # The servers set this too: a port whose last connections have just been closed is free.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            holder.bind(address)
        except OSError as error:
            holder.close()
            if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                continue  # one of the host's addresses that this machine does not have, such as ::1 of localhost
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"--host: {host} is not an address of this machine", param="host") from None
            raise cannot_listen(host, port, setting, str(error.strerror)) from None
        yield holder


def grpc_port_of(grpc_port: int | None, http_port: int) -> int:
    """Returns the gRPC port; None: the one after the HTTP port, or any free one where that is 0. Raises ConfigError."""
    if grpc_port is not None:
        return grpc_port
    if http_port == _LAST_PORT:
        raise ConfigError(f"--grpc-port: there is no port after --port {http_port}; give one", param="grpc_port")
    return http_port + 1 if http_port else 0


def cannot_listen(host: str, port: int, setting: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--{setting}: cannot listen on {host}:{port}: {reason}; stop the program that listens there, or give another "
        "port",
        param=setting.replace("-", "_"),
    )
