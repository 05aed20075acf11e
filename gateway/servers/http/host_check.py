"""Checks the Host header of requests to a server on loopback without API keys.

A page in a browser on this machine can have its own name resolve to 127.0.0.1 (DNS rebinding) and then read answers as
its own site's. Its requests still carry that name. Addresses and names without a dot cannot be such a page's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container
from contextlib import suppress

from outrider.shared.errors import InvalidRequest


def check_host(header: str, allowed: Container[str]) -> None:
    """Checks a Host header: name or address, with or without a port. Raises InvalidRequest."""
    name = header.strip().lower()
    if not name.endswith("]"):
        host, colon, port = name.rpartition(":")
        name = host if colon and port.isdigit() else name
    name = name.rstrip(".")
    with suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return
    if "." not in name or name.endswith(".localhost") or name in allowed:
        return
    raise InvalidRequest(
        f"Host {header[:200]!r} is not this server's; where a proxy sends it, name it in --allowed-hosts", param="host"
    )
