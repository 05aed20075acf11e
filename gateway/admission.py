"""What both doors ask before they do anything for a request: who is it, and is there room?

Not here: how a request comes in and how a refusal goes out (http_admission.py, grpc_admission.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.auth import KeyRing
from gateway.config import GatewayConfig
from gateway.quotas import Quotas
from shared.api_keys import ApiKey


@dataclass
class Admission:
    """One per gateway. Without a ring no key is asked for."""

    ring: KeyRing | None = None
    quotas: Quotas = field(default_factory=lambda: Quotas(512))
    protect_metrics: bool = False
    body_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0

    @classmethod
    def from_config(cls, config: GatewayConfig) -> Admission:
        """Raises ConfigError when the file of keys cannot be used."""
        return cls(
            ring=KeyRing(config.api_keys_file) if config.api_keys_file else None,
            quotas=Quotas(config.max_concurrent_requests),
            protect_metrics=config.protect_metrics,
            body_timeout_s=config.body_timeout_s,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
        )

    def identify(self, authorization: str | None) -> ApiKey | None:
        """The key of an Authorization header; None where none is asked for. Raises Unauthenticated."""
        return None if self.ring is None else self.ring.find(authorization)

    def reload_keys(self) -> None:
        """For SIGHUP."""
        if self.ring is not None:
            self.ring.reload()
