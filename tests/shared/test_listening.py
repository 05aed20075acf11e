"""A port is taken before anything is loaded; a busy one is named by its setting."""

from __future__ import annotations

import socket

import pytest

from outrider.shared.errors import ConfigError
from outrider.shared.listening import grpc_port_of, held_port
from tests.ports import server_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_busy_port_is_named(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port: cannot listen on {host}:{port}: ") as refused:
            held_port(host, port, "grpc-port").__enter__()
    assert refused.value.param == "grpc_port"


def test_who_connects_to_a_held_port_is_refused_and_a_server_may_follow() -> None:
    port = server_port()
    with held_port("127.0.0.1", port, "port"), socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
        pass
    # Its last connection may linger; a restarted service takes the port all the same.
    with held_port("127.0.0.1", port, "port"):
        pass


def test_no_server_needs_no_port() -> None:
    with held_port("no.such.host.invalid", -1, "port"):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here(host: str) -> None:
    for port in (0, 1024):
        with pytest.raises(ConfigError, match=f"--host: {host} is not an address of this machine"):
            held_port(host, port, "port").__enter__()


def test_the_grpc_port_follows_the_http_port() -> None:
    assert [grpc_port_of(None, port) for port in (8000, 9000, 0)] == [8001, 9001, 0]
    assert [grpc_port_of(port, 9000) for port in (-1, 0, 8001)] == [-1, 0, 8001]
    with pytest.raises(ConfigError, match="--grpc-port: there is no port after --port 65535; give one"):
        grpc_port_of(None, 65535)
