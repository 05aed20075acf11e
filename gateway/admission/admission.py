"""Admission checks of the HTTP and gRPC servers, made before any work for a request: identity and capacity.

Not here: reading requests and sending refusals (servers/http/admission.py, servers/grpc_admission.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.admission.body_budget import BodyBudget
from outrider.gateway.admission.quotas import Quotas
from outrider.gateway.config import GatewayConfig
from outrider.shared.api_keys import ApiKey, KeyRing
from outrider.shared.service import is_loopback


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
