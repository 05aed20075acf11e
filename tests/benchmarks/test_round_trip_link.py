"""The link of benchmarks/round_trip.py over real sockets: what it delays, what it must not change, what it counts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from statistics import median

import pytest

from benchmarks.simulation.link import DelayedLink
from tests.ports import nobodys_port


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """Address of a server that sends back what it is sent, and ends when it is told the end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(end: socket.socket) -> None:
        with end:
            while piece := end.recv(65536):
                end.sendall(piece)

    def accept() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.fixture(scope="module")
def link(echo: str) -> Iterator[tuple[DelayedLink, tuple[str, int]]]:
    with DelayedLink() as link:
        host, _, port = link.start(echo).rpartition(":")
        yield link, (host, int(port))


def _receive(end: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        received += end.recv(65536)
    return received


def _trip_s(end: socket.socket) -> float:
    started = time.perf_counter()
    end.sendall(b"ping")
    _receive(end, 4)
    return time.perf_counter() - started


@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_a_round_trip_takes_as_long_as_it_was_set(link: tuple[DelayedLink, tuple[str, int]], jitter: float) -> None:
    wire, address = link
    with socket.create_connection(address) as end:
        wire.set_delay(0.0)
        plain_s = median(_trip_s(end) for _ in range(15))
        wire.set_delay(0.2, jitter)
        trips = [_trip_s(end) for _ in range(15)]
    assert min(trips) >= 0.2 * (1.0 - jitter)
    # Above: what a busy machine adds, less than another way there or back.
    assert 0.16 <= median(trips) <= 0.2 + plain_s + 0.15
    if not jitter:
        assert min(trips) <= 0.2 + plain_s + 0.08


def test_what_follows_is_not_held_up_by_what_is_under_way(link: tuple[DelayedLink, tuple[str, int]]) -> None:
    """Five pieces 20 ms apart over a trip of 2 s are back after about 2.1 s; one after the other they took 10 s."""
    wire, address = link
    wire.set_delay(2.0)
    with socket.create_connection(address) as end:
        started = time.perf_counter()
        for number in range(5):
            end.sendall(bytes([number]))
            time.sleep(0.02)
        assert _receive(end, 5) == bytes(range(5))
        assert time.perf_counter() - started < 8.0


def test_every_byte_arrives_in_order_and_is_counted(link: tuple[DelayedLink, tuple[str, int]]) -> None:
    """More than the sockets hold, while the delay jumps about, and the end after it."""
    wire, address = link
    sent = b"".join(number.to_bytes(4, "big") for number in range(1_000_000))
    before = wire.num_bytes
    with socket.create_connection(address) as end:
        wire.set_delay(0.02, 1.0)
        sending = threading.Thread(target=lambda: (end.sendall(sent), end.shutdown(socket.SHUT_WR)))
        sending.start()
        time.sleep(0.3)  # nobody reads meanwhile: what is under way has to wait for room
        received = _receive(end, len(sent))
        assert end.recv(1) == b""
        sending.join()
    assert received == sent
    assert [after - was for after, was in zip(wire.num_bytes, before, strict=True)] == [len(sent), len(sent)]


def test_a_service_that_is_gone_refuses_through_the_link_too() -> None:
    with DelayedLink() as link:
        host, _, own_port = link.start(f"127.0.0.1:{nobodys_port()}").rpartition(":")
        with socket.create_connection((host, int(own_port))) as end:
            end.settimeout(60)
            with contextlib.suppress(ConnectionResetError):  # as good: the end is known
                assert end.recv(1) == b""


def test_a_link_that_was_not_started_says_so() -> None:
    with DelayedLink() as link, pytest.raises(RuntimeError, match="not been started"):
        link.set_delay(0.1)
