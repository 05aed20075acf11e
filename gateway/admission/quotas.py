"""Quotas: concurrent requests and tokens per minute per key, and concurrent requests of the gateway.

All are checked before a body is read, and again when the request is there: from then on it counts. One caller gets
another of the gateway's places while it holds fewer than are free: a sole caller half of them, each of two a third, so
that a place is left for the next one (dynamic thresholds, Choudhury and Hahne, 1998). Token use is known only later, so
a key's bucket is charged with the actual prompt and output tokens and may go below zero; the next request waits until
it is positive. Over any period a key gets what its bucket refills, plus what was already running.

One event loop uses all of this and nothing here awaits, so no lock is needed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar, cast

from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.shared.api_keys import ApiKey
from outrider.shared.errors import GatewayFull, QuotaExceeded

Clock = Callable[[], float]


class TokenBucket:
    """Capacity of one minute's tokens, refilled continuously, may be overdrawn. `clock` gives seconds."""

    def __init__(self, tokens_per_minute: int, clock: Clock) -> None:
        self.tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._filled_at = clock()

    def take(self, num_tokens: int) -> None:
        self._fill()
        self._level -= num_tokens

    def wait_s(self) -> float:
        """Seconds until the bucket has at least one token; 0 if it has one."""
        self._fill()
        return max(0.0, 1.0 - self._level) * 60.0 / self.tokens_per_minute

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled_at) * self.tokens_per_minute / 60.0
        self._level = min(float(self.tokens_per_minute), self._level + gained)
        self._filled_at = now


class Account:
    """One owner's current usage."""

    def __init__(self, owner: str, clock: Clock) -> None:
        self.owner = owner
        self.bucket: TokenBucket | None = None
        self._clock = clock

    def set_limit(self, tokens_per_minute: int) -> None:
        """Sets the limit. An unchanged bucket size keeps its level: reloading the key file is not a refill."""
        if tokens_per_minute == 0:
            self.bucket = None
        elif self.bucket is None or self.bucket.tokens_per_minute != tokens_per_minute:
            self.bucket = TokenBucket(tokens_per_minute, self._clock)

    def charge(self, num_tokens: int) -> None:
        if self.bucket is not None:
            self.bucket.take(num_tokens)


class Quotas:
    """The usage of all owners. `admit` reserves a slot for one request while its block runs."""

    def __init__(self, max_concurrent_requests: int, clock: Clock = time.monotonic) -> None:
        self._max_concurrent_requests = max_concurrent_requests
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._num_running_of: Counter[str] = Counter()
        self.num_running = 0

    @contextmanager
    def admit(self, key: ApiKey | None, peer: str = "") -> Iterator[Account | None]:
        """Raises QuotaExceeded or GatewayFull; both know when to try again. Without a key: no account."""
        account = self.check(key, peer)
        caller = peer if key is None else key.name
        self.num_running += 1
        self._num_running_of[caller] += 1
        try:
            yield account
        finally:
            self.num_running -= 1
            self._num_running_of[caller] -= 1
            if not self._num_running_of[caller]:
                del self._num_running_of[caller]

    def check(self, key: ApiKey | None, peer: str = "") -> Account | None:
        """Returns the key's account. Raises what `admit` would raise. peer: an address, the caller without a key."""
        account = None if key is None else self._account(key)
        num_own = self._num_running_of[peer if key is None else key.name]
        if key is not None and account is not None:
            _check(key, account, num_own)
        # After the key's own limits: who is over them learns that, not that the gateway is full.
        num_free = self._max_concurrent_requests - self.num_running
        if num_free <= 0:
            raise GatewayFull(f"the gateway is at its limit of {self.num_running} requests; try again later")
        if num_own >= num_free:
            raise QuotaExceeded(
                f"this {'address' if key is None else 'API key'} has {num_own} requests under way and only {num_free} "
                "more fit, which are left to others; try again when one has ended"
            )
        return account

    def _account(self, key: ApiKey) -> Account:
        account = self._accounts.setdefault(key.name, Account(key.name, self._clock))
        account.set_limit(key.tokens_per_minute)
        return account


def _check(key: ApiKey, account: Account, num_running: int) -> None:
    if key.max_concurrent and num_running >= key.max_concurrent:
        raise QuotaExceeded(
            f"this API key is at its limit of {num_running} running requests; try again when one has ended"
        )
    wait_s = account.bucket.wait_s() if account.bucket is not None else 0.0
    if wait_s > 0.0:
        raise QuotaExceeded(
            f"this API key has used its {key.tokens_per_minute} tokens per minute (prompt and output); "
            f"try again in {math.ceil(wait_s)} s",
            retry_after_s=wait_s,
        )


class _Generates(Protocol):
    def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]: ...


ServiceT = TypeVar("ServiceT", bound=_Generates)


def metered(service: ServiceT, account: Account | None) -> ServiceT:
    """Wraps the service for one caller: tokens from `generate` are charged to the account, the rest is unchanged."""
    if account is None or account.bucket is None:
        return service
    return cast(ServiceT, _MeteredService(service, account))


class _MeteredService:
    def __init__(self, service: _Generates, account: Account) -> None:
        self._service = service
        self._account = account

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        # A resumed prompt was charged by the connection that began the request.
        if not any(start.epoch or start.logged for start in request.starts):
            self._account.charge(len(request.prompt_token_ids))
        async with aclosing(self._service.generate(request)) as updates:
            async for update in updates:
                if not update.replayed:
                    self._account.charge(len(update.token_ids))
                yield update
