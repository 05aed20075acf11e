"""Decides who may use a drafter, and how much: keys, a quota of sessions, and engines that must agree on their tokens.

Not here: TLS (shared/tls.py) and the format of the key file (shared/api_keys.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider.shared.api_keys import KeyRing
from outrider.shared.errors import InvalidRequest, QuotaExceeded
from outrider.shared.messages import DrafterInfo
from outrider.shared.rpc import peer_of_context

# hex digits of a digest in a message
_SHOWN = 12


@dataclass(frozen=True)
class Tenant:
    """A caller: the owner of its key, or where no keys are required its address. max_sessions 0: no limit."""

    name: str
    has_key: bool
    max_sessions: int


class Tenants:
    """The tenants of one drafter and the number of their open sessions. Used on the event loop only."""

    def __init__(self, ring: KeyRing | None = None, max_sessions: int = 0) -> None:
        """max_sessions: of each tenant whose key does not say it."""
        self._ring = ring
        self._max_sessions = max_sessions
        self._num_open: Counter[str] = Counter()

    def identify(self, context: Any) -> Tenant:
        """Returns the tenant that a gRPC call comes from. Raises Unauthenticated."""
        if self._ring is None:
            return Tenant(peer_of_context(context), False, self._max_sessions)
        metadata: Any = context.invocation_metadata() or ()
        key = self._ring.find(next((value for name, value in metadata if name == "authorization"), None))
        return Tenant(key.name, True, key.max_concurrent or self._max_sessions)

    def take(self, tenant: Tenant) -> None:
        """Counts one more session. Raises QuotaExceeded."""
        if tenant.max_sessions and self._num_open[tenant.name] >= tenant.max_sessions:
            raise QuotaExceeded(f"{tenant.name} has {tenant.max_sessions} sessions open, its quota at this drafter")
        self._num_open[tenant.name] += 1

    def give_back(self, tenant: Tenant) -> None:
        self._num_open[tenant.name] -= 1
        if not self._num_open[tenant.name]:
            del self._num_open[tenant.name]


@dataclass(frozen=True)
class Engine:
    """The target of an engine, as it says before its first session; the fields are those of the wire."""

    model: str
    tokenizer_digest: str
    vocab_size: int
    method: str

    def require_same_tokens(self, info: DrafterInfo, others: Iterable[Engine]) -> None:
        """Compares the engine with what the drafter serves and with the other engines that it drafts for.

        Raises InvalidRequest that names the engine's model and the one that it differs from.
        """
        method = next((entry for entry in info.methods if entry.name == self.method), None)
        if method is None:
            served = ", ".join(entry.name for entry in info.methods)
            raise InvalidRequest(f"method {self.method!r} is not served here, only {served}", param="method")
        known = list(others)
        if method.vocab_size:
            known.insert(0, Engine(method.model or method.name, info.tokenizer_digest, method.vocab_size, method.name))
        for other in known:
            if self.tokenizer_digest and other.tokenizer_digest:
                agrees = self.tokenizer_digest == other.tokenizer_digest
            else:
                agrees = self.vocab_size == other.vocab_size
            if not agrees:
                raise InvalidRequest(
                    f"the token ids of {self._described()} are not those of {other._described()}, which this drafter "
                    "drafts for; an engine of another model needs drafters of its own",
                    param="engine",
                )

    def _described(self) -> str:
        digest = self.tokenizer_digest[:_SHOWN] or "not known"
        return f"{self.model!r} ({self.vocab_size} ids, tokenizer {digest})"
