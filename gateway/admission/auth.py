"""Admission of callers: who sends a request, and what the servers ask before any work for it.

The servers attach a `Caller` to each request, on the ASGI scope or on the gRPC method's context; `caller_of` and
`owner_of` read it. A caller without a key is named by its address, by both servers alike. Behind a proxy all clients
have the address of the proxy, unless the HTTP server is told to trust its X-Forwarded-For (FORWARDED_ALLOW_IPS of
uvicorn).

Not here: the keys (shared/api_keys.py), quotas (quotas.py) and the servers (servers/http/admission.py,
servers/grpc_admission.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.admission.body_budget import BodyBudget, Held
from outrider.gateway.admission.quotas import Account, Quotas
from outrider.gateway.config import GatewayConfig
from outrider.shared.api_keys import ApiKey, KeyRing
from outrider.shared.rpc import network_of
from outrider.shared.service import is_loopback

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


@dataclass
class Admission:
    """Admission checks, one set per gateway. Without a key ring, no key is required."""

    ring: KeyRing | None = None
    quotas: Quotas = field(default_factory=lambda: Quotas(1024))
    bodies: BodyBudget = field(default_factory=BodyBudget)
    # Names in Host headers; None: every one is answered to.
    allowed_hosts: frozenset[str] | None = None
    protect_metrics: bool = False
    body_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0

    @classmethod
    def from_config(cls, config: GatewayConfig) -> Admission:
        """Raises ConfigError when the key file is unusable."""
        is_open = not config.api_keys_file and is_loopback(config.host)
        return cls(
            allowed_hosts=frozenset(map(str.lower, config.allowed_hosts)) if is_open else None,
            ring=KeyRing(config.api_keys_file) if config.api_keys_file else None,
            quotas=Quotas(config.max_concurrent_requests),
            protect_metrics=config.protect_metrics,
            body_timeout_s=config.body_timeout_s,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
        )

    def identify(self, authorization: str | None) -> ApiKey | None:
        """Returns the key in an Authorization header; None where no key is required. Raises Unauthenticated."""
        return None if self.ring is None else self.ring.find(authorization)

    def reload_keys(self) -> None:
        """Reloads the API keys, on SIGHUP."""
        if self.ring is not None:
            self.ring.reload()
