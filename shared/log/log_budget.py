"""The budget of bytes that this gateway's requests may hold in Redis, for each caller and in total.

A request holds its record and its entries for as long as Redis keeps them: until the time to live that was set last is
over. Only new requests are refused; one that has begun continues.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from outrider.shared.errors import GatewayFull, PayloadTooLarge, QuotaExceeded

# bytes; keys, fence and bookkeeping of one request in Redis 7; MEMORY USAGE of an empty one
_BYTES_PER_REQUEST = 1024
# bytes; field names and ids of one entry
_BYTES_PER_ENTRY = 64
# share; of all bytes, one API key's
_OWNER_SHARE = 0.25


@dataclass
class Hold:
    """One request's bytes. `expires_at`: clock seconds."""

    expires_at: float
    owner: str
    num_bytes: int
    is_counted: bool = True


class LogBudget:
    """The budget of one gateway. max_record_bytes: limit of one record. total_bytes: limit of all requests together."""

    def __init__(self, *, max_record_bytes: int, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_record_bytes = max_record_bytes
        self._total_bytes = total_bytes
        self._owner_bytes = int(total_bytes * _OWNER_SHARE)
        self._clock = clock
        self._held: defaultdict[str, int] = defaultdict(int)
        # Heap by expiry time; a hold whose time to live was renewed since is pushed again.
        self._expiring: list[tuple[float, int, Hold]] = []
        self._num_holds = 0

    @property
    def num_bytes(self) -> int:
        self._forget_expired()
        return sum(self._held.values())

    def hold(self, owner: str, record_bytes: int, ttl_s: float) -> Hold:
        """Counts a request that begins. owner: the name of an API key, or nothing.

        Raises PayloadTooLarge, QuotaExceeded or GatewayFull.
        """
        if record_bytes > self._max_record_bytes:
            raise PayloadTooLarge(
                f"the request's prompts and parameters take {record_bytes} bytes in the log, "
                f"the most is {self._max_record_bytes}; send fewer prompts or shorter lists with each"
            )
        wanted = record_bytes + _BYTES_PER_REQUEST
        self._forget_expired()
        if owner and self._held[owner] + wanted > self._owner_bytes:
            raise QuotaExceeded(
                f"this API key's requests hold {self._held[owner]} bytes in the log, the most is {self._owner_bytes}; "
                "try again when some have expired",
                retry_after_s=self._next_expiry_s(),
            )
        if sum(self._held.values()) + wanted > self._total_bytes:
            raise GatewayFull(
                "the requests of this gateway fill their share of the log; try again later",
                retry_after_s=self._next_expiry_s(),
            )
        return self.count(owner, wanted, ttl_s)

    def count(self, owner: str, num_bytes: int, ttl_s: float) -> Hold:
        """Counts bytes without checking the limits."""
        hold = Hold(self._clock() + ttl_s, owner, num_bytes)
        self._held[owner] += num_bytes
        self._watch(hold)
        return hold

    def grow(self, hold: Hold, entry_bytes: int, ttl_s: float) -> None:
        """Counts one more entry and renews the time to live."""
        self._forget_expired()
        added = entry_bytes + _BYTES_PER_ENTRY
        if not hold.is_counted:  # expired before its first tokens, and written again
            hold.is_counted = True
            self._held[hold.owner] += hold.num_bytes
            self._watch(hold)
        hold.num_bytes += added
        self._held[hold.owner] += added
        if (expires_at := self._clock() + ttl_s) < hold.expires_at:
            hold.expires_at = expires_at
            self._watch(hold)
        hold.expires_at = expires_at

    def _watch(self, hold: Hold) -> None:
        self._num_holds += 1
        heapq.heappush(self._expiring, (hold.expires_at, self._num_holds, hold))

    def _next_expiry_s(self) -> float:
        return max(1.0, self._expiring[0][0] - self._clock()) if self._expiring else 1.0

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, _, hold = heapq.heappop(self._expiring)
            if hold.is_counted and hold.expires_at <= now:
                hold.is_counted = False
                self._held[hold.owner] -= hold.num_bytes
            elif hold.is_counted:
                self._watch(hold)
