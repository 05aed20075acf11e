"""Authentication: the known API keys, and the caller attached to each request.

`KeyRing` reads the key file (format: shared/api_keys.py) and finds keys. The servers attach a `Caller` to each request,
on the ASGI scope or on the gRPC method's context; `caller_of` and `owner_of` read it.

A caller without a key is named by its address. An IPv6 client has a network of 2^64 addresses (RFC 6177), so that
network is its name. Both servers give one client the same name. Behind a proxy all clients have the proxy's address,
unless the HTTP server is told to trust its X-Forwarded-For (uvicorn's FORWARDED_ALLOW_IPS).

Not here: quotas (quotas.py) and the servers (servers/http/admission.py, servers/grpc_admission.py).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from outrider.gateway.admission.body_budget import Held
from outrider.gateway.admission.quotas import Account
from outrider.shared.api_keys import ApiKey, key_digest, parse_key_file
from outrider.shared.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

_CALLER = "outrider.caller"
_MAX_FILE_BYTES = 4 * 1024 * 1024
_IPV6_PREFIX_LEN = 64  # bits


@dataclass(frozen=True)
class Caller:
    """The caller of a request. owner: the key's name, "" where no keys are required. account: the owner's usage, None
    if not counted. held: the share of the gateway's memory that the request's body and answer use. peer: the address
    that it came from.
    """

    owner: str = ""
    account: Account | None = None
    held: Held | None = None
    peer: str = ""

    @property
    def name(self) -> str:
        """The caller whose share of the verifiers its outputs use: the key's owner, or without keys the address."""
        return self.owner or self.peer


NOBODY = Caller()


class KeyRing:
    """The keys of one file. Raises ConfigError when the file is unusable at the start."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._keys = self._load()

    def reload(self) -> None:
        """Reads the file again. A broken file is logged and changes nothing."""
        try:
            self._keys = self._load()
        except ConfigError as error:
            log.error("the API keys are unchanged: %s", error.message)
        else:
            log.info("%d API keys from %s", len(self._keys), self._path)

    def find(self, authorization: str | None) -> ApiKey:
        """Returns the key in an Authorization header. Raises Unauthenticated."""
        scheme, _, text = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise Unauthenticated("an API key is required: send it as Authorization: Bearer KEY")
        digest = key_digest(text.strip())
        found = None
        # Compares every entry in constant time, so that timing reveals nothing about the keys.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthenticated("the API key is unknown")
        return found

    def _load(self) -> tuple[ApiKey, ...]:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            text = data.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"--api-keys-file {self._path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--api-keys-file {self._path} is not text") from None
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-keys-file {self._path} is over {_MAX_FILE_BYTES} bytes")
        return parse_key_file(text, f"--api-keys-file {self._path}")


class CallerContext:
    """A gRPC context with a caller; delegates the rest to the context, which takes no attributes."""

    def __init__(self, context: Any, caller: Caller) -> None:
        self._context = context
        self.caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def put_caller(scope: Any, caller: Caller) -> None:
    """Attaches the caller to the ASGI scope of an HTTP request."""
    scope[_CALLER] = caller


def caller_of(request_or_context: Any) -> Caller:
    """Returns the caller of a Starlette request or a gRPC context; NOBODY where none is attached."""
    if isinstance(request_or_context, CallerContext):
        return request_or_context.caller
    scope = getattr(request_or_context, "scope", None)
    caller = scope.get(_CALLER) if isinstance(scope, dict) else None
    return caller if isinstance(caller, Caller) else NOBODY


def owner_of(request_or_context: Any) -> str:
    """Returns the name of the request's API key; "" where keys are not required."""
    return caller_of(request_or_context).owner


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
