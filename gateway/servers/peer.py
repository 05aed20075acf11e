"""The address that a call came from, as the name of a caller without an API key.

An IPv6 client has a network of 2^64 addresses (RFC 6177), so that network is its name. Both servers give one client the
same name. Behind a proxy all clients have the proxy's address, unless the HTTP server is told to trust its
X-Forwarded-For (uvicorn's FORWARDED_ALLOW_IPS).
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import unquote

_IPV6_PREFIX_LEN = 64  # bits


def peer_of_scope(scope: Any) -> str:
    """Returns the peer of an HTTP request's ASGI scope; "" if the server does not report one."""
    client = scope.get("client")
    return _network(client[0]) if client else ""


def peer_of_context(context: Any) -> str:
    """Returns the peer of a gRPC call, from its context's peer(): `ipv4:HOST:PORT`, `ipv6:[HOST]:PORT` with escaped
    brackets, or another form.
    """
    kind, _, rest = unquote(context.peer()).partition(":")
    return _network(rest.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else kind


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX_LEN), strict=False))
