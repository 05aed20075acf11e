"""Authentication: the caller attached to each request.

The servers attach a `Caller` to each request, on the ASGI scope or on the gRPC method's context; `caller_of` and
`owner_of` read it. A caller without a key is named by its address, by both servers alike. Behind a proxy all clients
have the address of the proxy, unless the HTTP server is told to trust its X-Forwarded-For (FORWARDED_ALLOW_IPS of
uvicorn).

Not here: the keys (shared/api_keys.py), quotas (quotas.py) and the servers (servers/http/admission.py,
servers/grpc_admission.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.gateway.admission.body_budget import Held
from outrider.gateway.admission.quotas import Account
from outrider.shared.rpc import network_of

_CALLER = "outrider.caller"


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
    return network_of(client[0]) if client else ""
