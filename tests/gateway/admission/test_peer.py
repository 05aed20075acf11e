"""Which caller an address is."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.gateway.admission.auth import peer_of_scope
from outrider.shared.rpc import peer_of_context


class Context:
    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


@pytest.mark.parametrize(
    ("http", "grpc", "name"),
    [
        ("192.0.2.7", "ipv4:192.0.2.7:50051", "192.0.2.7"),
        ("2001:db8:1:2::7", "ipv6:%5B2001:db8:1:2::7%5D:50051", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "ipv6:[2001:db8:1:2:ffff::1]:1", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "ipv6:%5B::ffff:192.0.2.7%5D:50051", "192.0.2.7"),
        ("fe80::1%eth0", "ipv6:%5Bfe80::1%25eth0%5D:9", "fe80::/64"),
    ],
)
def test_both_doors_give_a_client_one_name(http: str, grpc: str, name: str) -> None:
    assert peer_of_scope({"client": (http, 4321)}) == name
    assert peer_of_context(Context(grpc)) == name


@pytest.mark.parametrize("scope", [{}, {"client": None}])
def test_a_server_may_not_say(scope: dict[str, Any]) -> None:
    assert peer_of_scope(scope) == ""


def test_what_is_no_address_is_a_name_too() -> None:
    assert peer_of_scope({"client": ("testclient", 1)}) == "testclient"
    assert peer_of_context(Context("unix:/run/socket")) == "unix"
