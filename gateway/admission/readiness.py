"""Decides whether the gateway takes requests at all now, and gives the answer of /ready."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.fleet.pool import Pool
from outrider.shared.errors import LOG_RETRY_S, Unavailable
from outrider.shared.log.patient_redis import RedisState
from outrider.shared.messages import VerifierInfo


@dataclass(frozen=True)
class ReadyState:
    """The answer of /ready. reason: why not. warning: what does not work as configured although it is ready."""

    ready: bool
    reason: str = ""
    warning: str = ""


@dataclass
class Readiness:
    """is_draining: the gateway is shutting down. redis: its state when it was last checked."""

    verifiers: Pool[VerifierInfo]
    is_draining: bool = False
    redis: RedisState = field(default_factory=lambda: RedisState(answers=True))

    def check_open(self) -> None:
        """Raises Unavailable while the gateway is shutting down."""
        if self.is_draining:
            raise Unavailable("the gateway is shutting down")

    def check(self) -> None:
        """Raises Unavailable if no request can begin: a Redis that is unreachable is waited for, one that is full or
        read-only is not.
        """
        self.check_open()
        if self.redis.refusal:
            raise Unavailable(
                f"the commit log takes no writes ({self.redis.refusal}); try again later", retry_after_s=LOG_RETRY_S
            )

    def state(self, warning: str) -> ReadyState:
        """Returns the answer of /ready. It is ready without a drafter too: decoding then runs without speculation."""
        if self.is_draining:
            return ReadyState(False, "the gateway is shutting down")
        if not self.redis.answers:
            return ReadyState(False, "Redis does not answer")
        if self.redis.refusal:
            return ReadyState(False, f"Redis takes no writes: {self.redis.refusal}")
        if not self.verifiers.healthy():
            return ReadyState(False, "no verifier is serving")
        return ReadyState(True, warning=warning)
