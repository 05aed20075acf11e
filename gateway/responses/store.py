"""Responses in Redis, so that any gateway can return one, or continue it as the beginning of another.

A finished response is one value under its owner and id, which expires; the first that is stored stays. The items of its
output are also stored under their own ids. A deleted response leaves an empty value until it would have expired: a
gateway that resumes its request's stream must not store it again.

A response in the background has two more values while it runs: its state until then, and the lease of the gateway that
works on it. One command renews all of a gateway's leases: 1 ms of CPU for 512, whose own commands took 30 to 140.
Not here: what the values contain (stored.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from urllib.parse import quote

from outrider.shared.errors import CommitRefused, GatewayFull, InternalError, QuotaExceeded, Unavailable, UnknownSession
from outrider.shared.log.log_budget import LogBudget
from outrider.shared.log.patient_redis import PatientRedis

# seconds; lease of the gateway that works on a response, after which another one continues it
_LEASE_S = 15
# keys; of one command, which Redis answers at once
_MAX_KEYS = 256
# seconds; between two renewals of the lease, and at most from a cancellation to the end of the work
_BEAT_S = 2.0
# KEYS: each response's end and its lease. Renews the leases of those without an end; returns for each whether it has
# ended.
_BEAT = """
local ended = {}
for place = 1, #KEYS, 2 do ended[#ended + 1] = redis.call('EXISTS', KEYS[place]) end
for place, has_ended in ipairs(ended) do
  if has_ended == 0 then redis.call('SET', KEYS[2 * place], '1', 'EX', ARGV[1]) end
end
return ended
"""


class ResponseStore:
    """The stored responses. owner: an API key's name; "" if none is required. All but `reserve` raise Unavailable."""

    def __init__(self, redis: PatientRedis, *, ttl_s: int, budget: LogBudget) -> None:
        self._redis = redis
        self._ttl_s = ttl_s
        self._budget = budget
        # By the future that its end sets: the keys of a response that this gateway works on.
        self._at_work: dict[asyncio.Future[None], tuple[str, str]] = {}
        self._beats: asyncio.Task[None] | None = None

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserves room for a new response. Raises PayloadTooLarge, QuotaExceeded or GatewayFull."""
        try:
            self._budget.hold(owner, num_bytes, self._ttl_s)
        except (QuotaExceeded, GatewayFull) as error:
            message = f"stored responses: {error.message}, or send store: false"
            raise type(error)(message, retry_after_s=error.retry_after_s) from None

    async def put(self, owner: str, response_id: str, document: bytes, num_reserved: int) -> bool:
        """Stores a new response; False if the id is taken. Bytes beyond those reserved are counted without a check."""
        key = self._key("response", owner, response_id)
        if await self._redis.call(partial(_put_once, key, document, self._ttl_s)):
            self._budget.count(owner, max(0, len(document) - num_reserved), self._ttl_s)
            return True
        return False

    async def put_items(self, owner: str, items: Mapping[str, bytes]) -> None:
        """Stores the items of a finished response under their ids."""
        for item_id, document in items.items():
            key = self._key("item", owner, item_id)
            if await self._redis.call(partial(_put_once, key, document, self._ttl_s)):
                self._budget.count(owner, len(document), self._ttl_s)

    async def get_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """Returns the documents of those items that are stored, by id."""
        found: dict[str, bytes] = {}
        for ids in _some(item_ids):
            keys = [self._key("item", owner, item_id) for item_id in ids]
            documents = await self._redis.call(partial(tuple, ("MGET", *keys)))
            found.update((item_id, one) for item_id, one in zip(ids, documents, strict=True) if one)
        return found

    async def forget_items(self, owner: str, item_ids: Sequence[str]) -> None:
        for ids in _some(item_ids):
            keys = [self._key("item", owner, item_id) for item_id in ids]
            await self._redis.call(partial(tuple, ("DEL", *keys)))

    async def get(self, owner: str, response_id: str) -> bytes:
        """Returns a finished or running response. Raises UnknownSession: never stored, expired, deleted or another
        owner's, which all look the same.
        """
        document = await self._get("response", owner, response_id)
        if document is None:
            # Between the two looks it may have finished.
            running = await self._get("running", owner, response_id)
            document = running or await self._get("response", owner, response_id)
        return _known(document, response_id)

    async def delete(self, owner: str, response_id: str) -> bytes:
        """Deletes a response and returns what it was; empty if it was running. Raises UnknownSession."""
        key = self._key("response", owner, response_id)
        document = await self._redis.call(lambda: ("SET", key, b"", "XX", "KEEPTTL", "GET"))
        if document is None and await self._get("running", owner, response_id):
            document = await self._redis.call(lambda: ("SET", key, b"", "EX", self._ttl_s)) and b"running"
        await self.forget_running(owner, response_id)
        return _known(document, response_id).removeprefix(b"running")

    # ---- in the background ----

    async def begin(self, owner: str, response_id: str, document: bytes) -> None:
        """Raises CommitRefused when there is one of this id."""
        key = self._key("running", owner, response_id)
        if not await self._redis.call(partial(_put_once, key, document, self._ttl_s)):
            raise CommitRefused("a response with this request_id is running already; choose another id")
        await self.take_over(owner, response_id)

    @contextmanager
    def at_work(self, owner: str, response_id: str) -> Iterator[asyncio.Future[None]]:
        """Renews the lease of this gateway. The future is done once the response is finished, cancelled or deleted."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_work[ended] = self._key("response", owner, response_id), self._key("lease", owner, response_id)
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat_forever(), name="response-leases")
        try:
            yield ended
        finally:
            del self._at_work[ended]
            if not self._at_work:
                self._beats.cancel()
                self._beats = None

    async def _beat_forever(self) -> None:
        while True:
            with suppress(Unavailable, InternalError):  # the next one may succeed before the leases have expired
                await self._beat()
            await asyncio.sleep(_BEAT_S)

    async def _beat(self) -> None:
        at_work = dict(self._at_work)
        keys = [key for pair in at_work.values() for key in pair]
        flags = await self._redis.call(lambda: ("EVAL", _BEAT, len(keys), *keys, _LEASE_S))
        for ended, has_ended in zip(at_work, flags, strict=True):
            if has_ended and not ended.done():
                ended.set_result(None)

    async def take_over(self, owner: str, response_id: str) -> bool:
        """Takes over the response's generation; returns False if a gateway is already working on it."""
        key = self._key("lease", owner, response_id)
        return bool(await self._redis.call(lambda: ("SET", key, b"1", "NX", "EX", _LEASE_S)))

    async def let_go(self, owner: str, response_id: str) -> None:
        """Drops the lease, so that another gateway may continue at once."""
        key = self._key("lease", owner, response_id)
        await self._redis.call(lambda: ("DEL", key))

    async def forget_running(self, owner: str, response_id: str) -> None:
        key = self._key("running", owner, response_id)
        await self._redis.call(lambda: ("DEL", key))
        await self.let_go(owner, response_id)

    async def _get(self, kind: str, owner: str, response_id: str) -> bytes | None:
        key = self._key(kind, owner, response_id)
        document: bytes | None = await self._redis.call(lambda: ("GET", key))
        return document

    def _key(self, kind: str, owner: str, response_id: str) -> str:
        # Quoted, an owner has no colon: no id can reach into another owner's.
        return f"outrider:{kind}:{quote(owner, safe='')}:{response_id}"


def _some(item_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (item_ids[place : place + _MAX_KEYS] for place in range(0, len(item_ids), _MAX_KEYS))


def _known(document: bytes | None, response_id: str) -> bytes:
    if not document:
        raise UnknownSession(f"Response with id {response_id[:200]!r} not found: it may have expired")
    return document


def _put_once(key: str, document: bytes, ttl_s: int) -> tuple[str | bytes | int, ...]:
    """Returns the command that stores a value for ttl_s seconds, unless there is one."""
    return "SET", key, document, "NX", "EX", ttl_s
