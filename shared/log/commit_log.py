"""The commit log in Redis: the source of truth for a request's output, and all that another gateway needs to resume it.

Per request one record (the request, in the caller's bytes). Per choice one stream of entries, whose ids are the output
index of their first token plus 1 (Redis ids start above 0-0), and one fence: the term of the gateway that may write.
A Lua script refuses gaps, repeats and superseded gateways.

The writing gateway also holds the log in memory. If a restarted Redis has lost the log's end, the gateway restores it
before continuing, unless another gateway has a later term.

Not here: what records and extras mean (gateway/), waiting for Redis (patient_redis.py), scripts (commit_scripts.py).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.shared.errors import CommitRefused, LogUnavailable, UnknownSession
from outrider.shared.log import commit_scripts as scripts
from outrider.shared.log.log_budget import Hold, LogBudget
from outrider.shared.log.patient_redis import PatientRedis, RedisState

# seconds; a commit waits this long for an unreachable Redis, so that a restart fails no request
PATIENCE_S = 15.0
# per time to live; rate at which running choices refresh the expiry of finished ones
_REFRESHES_PER_TTL = 4
# bytes; of a record, by which the log's scripts know it: they hold its random nonce (log.proto)
_RECORD_HEAD_BYTES = 128


@dataclass(frozen=True)
class LogEntry:
    """Tokens from output index `base_len` on. finish_reason: 0 while the session continues.

    epoch: the verifier session that they come from, unlike all others (ChoiceStart). extras: the caller's own bytes.
    """

    base_len: int
    token_ids: tuple[int, ...]
    finish_reason: int
    epoch: int = 0
    extras: bytes = b""

    @property
    def end(self) -> int:
        return self.base_len + len(self.token_ids)


class CommitLog:
    """The commit logs of all requests, one object per gateway process.

    Call `start` in the event loop that uses it, `close` at the end.
    """

    def __init__(
        self,
        redis: PatientRedis,
        *,
        ttl_s: int,
        ended_ttl_s: int | None = None,
        budget: LogBudget | None = None,
    ) -> None:
        """Sets the seconds that a request is kept: `ttl_s` after each of its tokens, `ended_ttl_s` before its first and
        after its last one; None: `ttl_s` too. Without a budget nothing is counted.
        """
        self.ttl_s = ttl_s
        self.ended_ttl_s = ttl_s if ended_ttl_s is None else min(ended_ttl_s, ttl_s)
        self.budget = budget
        # Requests whose log Redis had lost and that were restored.
        self.num_restores = 0
        self.redis = redis

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        ttl_s: int,
        patience_s: float = PATIENCE_S,
        ended_ttl_s: int | None = None,
        budget: LogBudget | None = None,
    ) -> CommitLog:
        redis = PatientRedis.connect(url, patience_s=patience_s, scripts=scripts.ALL)
        return cls(redis, ttl_s=ttl_s, ended_ttl_s=ended_ttl_s, budget=budget)

    async def start(self) -> None:
        """Waits for Redis. Raises Unavailable when it refuses, or does not answer within a commit's patience."""
        await self.redis.start()

    async def close(self) -> None:
        await self.redis.close()

    async def check(self) -> RedisState:
        """Tests with a write whether Redis would take an append now."""
        return await self.redis.check_write("outrider:write-check")

    def new(self, request_id: str, record: bytes, owner: str = "") -> RequestLog:
        """A request that begins here; nothing is sent before `begin`. Raises what LogBudget.hold raises."""
        hold = None if self.budget is None else self.budget.hold(owner, len(record), self.ended_ttl_s)
        return RequestLog(self, self.keys(request_id), record, hold=hold)

    async def find(self, request_id: str) -> RequestLog | None:
        """A request begun at any gateway; None when unknown or expired. Raises Unavailable."""
        keys = self.keys(request_id)
        record = await self.redis.call(lambda: ("GET", keys.record))
        return RequestLog(self, keys, record, is_begun=True) if record is not None else None

    def keys(self, request_id: str) -> RequestKeys:
        # The braces place all keys of a request on one node of a Redis cluster.
        return RequestKeys(f"outrider:{{{request_id}}}")

    async def run_script(self, script: str, keys: Sequence[str], args: Callable[[], Sequence[Any]]) -> Any:
        """Runs a script. `args` is called at the moment of sending, so that the arguments are current."""
        sha = _sha(script)
        return await self.redis.call(lambda: ("EVALSHA", sha, len(keys), *keys, *args()))

    async def read_streams(self, names: Sequence[str]) -> list[tuple[LogEntry, ...]]:
        """Returns all entries of each stream, in order of their output index. Raises Unavailable."""

        async def read(name: str) -> tuple[LogEntry, ...]:
            return tuple(map(_entry, await self.redis.call(lambda: ("XRANGE", name, "-", "+"))))

        return list(await asyncio.gather(*map(read, names)))


@dataclass(frozen=True)
class RequestKeys:
    stem: str

    @property
    def record(self) -> str:
        return f"{self.stem}:record"

    def log(self, choice: int) -> str:
        return f"{self.stem}:{choice}:log"

    def fence(self, choice: int) -> str:
        return f"{self.stem}:{choice}:fence"


class RequestLog:
    """One request as this gateway writes it. holder: this writer's name."""

    def __init__(
        self,
        log: CommitLog,
        keys: RequestKeys,
        record: bytes,
        *,
        is_begun: bool = False,
        hold: Hold | None = None,
    ) -> None:
        """hold: the request's bytes in the budget; None if another gateway, or another connection, began it."""
        self.record = record
        self.record_head = record[:_RECORD_HEAD_BYTES]
        self._hold = hold
        self.holder = secrets.token_hex(8)
        self.keys = keys
        self._log = log
        self._choices: dict[int, ChoiceLog] = {}
        self._beginning: asyncio.Task[None] | None = None
        self._is_begun = is_begun
        self._restoring: asyncio.Task[None] | None = None
        self._refresh_at = time.monotonic() + log.ttl_s / _REFRESHES_PER_TTL

    def begin(self) -> None:
        """Starts sending the record; `begun` reports the outcome, at the latest before the first entry."""
        if not self._is_begun and self._beginning is None:
            self._beginning = asyncio.create_task(self._begin(), name=f"begin-{self.keys.stem}")
            self._beginning.add_done_callback(_retrieve_exception)

    async def begun(self) -> None:
        """Waits until the record is written.

        Raises CommitRefused when another request has this id, Unavailable when Redis is away for too long.
        """
        if not self._is_begun:
            self.begin()
            if self._beginning is not None:
                await asyncio.shield(self._beginning)

    async def _begin(self) -> None:
        args = (self.record, self._log.ended_ttl_s)
        if not await self._log.run_script(scripts.BEGIN, (self.keys.record,), lambda: args):
            raise CommitRefused(
                "a request with this request_id already exists: resume it (GET /v1/streams/ID), or choose another id"
            )
        self._is_begun = True

    async def read(self, choices: Sequence[int]) -> dict[int, tuple[LogEntry, ...]]:
        logs = await self._log.read_streams([self.keys.log(choice) for choice in choices])
        return dict(zip(choices, logs, strict=True))

    async def claim(self, choices: Sequence[int]) -> dict[int, int]:
        """The new term of each; from now on no other gateway can write to them. Raises UnknownSession."""
        keys = (self.keys.record, *map(self.keys.fence, choices))
        terms = await self._log.run_script(
            scripts.CLAIM, keys, lambda: (self.holder, self._log.ttl_s, self.record_head)
        )
        if not terms:
            raise UnknownSession("the request has expired")
        return dict(zip(choices, map(int, terms), strict=True))

    def choice(self, choice: int, *, term: int = 0, entries: Iterable[LogEntry] = ()) -> ChoiceLog:
        """A choice to write to: from its start, or after `entries` with the claimed term."""
        self._choices[choice] = ChoiceLog(self, self._log, choice, term, entries)
        return self._choices[choice]

    async def restore(self) -> None:
        """Restores all of this gateway's choices in Redis. Concurrent callers share one restore."""
        if self._restoring is None:
            self._restoring = asyncio.create_task(self._restore(), name=f"restore-{self.keys.stem}")
            self._restoring.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._restoring)

    async def _restore(self) -> None:
        def sent() -> None:
            self._restoring = None

        try:
            await asyncio.gather(*(choice.restore(sent) for choice in self._choices.values()))
            self._log.num_restores += 1
        finally:
            sent()

    @property
    def has_ended(self) -> bool:
        return all(choice.has_ended for choice in self._choices.values())

    def grow(self, num_bytes: int, ttl_s: int) -> None:
        """An entry more in the log."""
        if self._log.budget is not None and self._hold is not None:
            self._log.budget.grow(self._hold, num_bytes, ttl_s)

    def keys_to_refresh(self, choice: int, *, has_ended: bool) -> tuple[str, ...]:
        """The other choices' keys, _REFRESHES_PER_TTL times per time to live and at the end; else none."""
        now = time.monotonic()
        if now < self._refresh_at and not has_ended:
            return ()
        self._refresh_at = now + self._log.ttl_s / _REFRESHES_PER_TTL
        others = [other for other in self._choices if other != choice]
        return (*map(self.keys.log, others), *map(self.keys.fence, others))


class ChoiceLog:
    """One choice's entries: in Redis and in memory."""

    def __init__(
        self, request: RequestLog, log: CommitLog, choice: int, term: int, entries: Iterable[LogEntry]
    ) -> None:
        self.choice = choice
        self.term = term
        self._request = request
        self._log = log
        self._entries = list(entries)
        # Output index up to which Redis has confirmed.
        self.logged_len = self._entries[-1].end if self._entries else 0
        self._is_taken_over = False

    @property
    def has_ended(self) -> bool:
        return bool(self._entries) and self._entries[-1].finish_reason != 0

    async def append(self, entry: LogEntry) -> None:
        """Returns once Redis has the entry.

        Raises CommitRefused (a gap, a repeat, a later term, another request with this id), or LogUnavailable, which
        says how far the log is known to reach.
        """
        end = self._entries[-1].end if self._entries else 0
        if entry.base_len != end:
            raise CommitRefused(f"an append at output index {entry.base_len} of a log that ends at {end}")
        try:
            await self._request.begun()
            self._entries.append(entry)
            # The request has not ended while this choice goes on.
            has_ended = entry.finish_reason != 0 and self._request.has_ended
            ttl_s = self._log.ended_ttl_s if has_ended else self._log.ttl_s
            args = (self.term, self._request.holder, ttl_s, *_fields(entry), self._request.record_head)
            self._request.grow(4 * len(entry.token_ids) + len(entry.extras), ttl_s)
            code = await self._log.run_script(scripts.APPEND, self._keys(has_ended), lambda: args)
            if code == scripts.DOES_NOT_FIT:
                await self._request.restore()
            self._is_taken_over |= code == scripts.TAKEN_OVER
        except LogUnavailable as error:
            raise LogUnavailable(f"{error.message}; {self._committed()}") from error
        if self._is_taken_over:
            raise CommitRefused(
                f"another connection has taken over this request, this stream ends here; {self._committed()}"
            )
        self.logged_len = entry.end

    async def restore(self, sent: Callable[[], None]) -> None:
        """Restores the log from memory. `sent` is called when the entries are read: later appends are not included."""

        def args() -> Sequence[Any]:
            sent()
            fields = [field for entry in self._entries for field in _fields(entry)]
            return (self.term, self._request.holder, self._log.ttl_s, self._request.record, *fields)

        keys = self._request.keys
        named = (keys.log(self.choice), keys.fence(self.choice), keys.record)
        code = await self._log.run_script(scripts.RESTORE, named, args)
        self._is_taken_over |= code == scripts.TAKEN_OVER

    def _keys(self, has_ended: bool) -> Sequence[str]:
        keys = self._request.keys
        refreshed = self._request.keys_to_refresh(self.choice, has_ended=has_ended)
        return (keys.log(self.choice), keys.fence(self.choice), keys.record, *refreshed)

    def _committed(self) -> str:
        return f"output tokens [0, {self.logged_len}) are committed"


@functools.cache
def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _fields(entry: LogEntry) -> tuple[Any, ...]:
    tokens = struct.pack(f"<{len(entry.token_ids)}I", *entry.token_ids)
    return entry.base_len, len(entry.token_ids), tokens, entry.finish_reason, entry.epoch, entry.extras


def _entry(raw: tuple[bytes, list[bytes]]) -> LogEntry:
    """Parses a stream's entry. raw: the entry's id, then alternating names and values."""
    entry_id, flat = raw
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    tokens = fields[b"t"]
    return LogEntry(
        base_len=int(entry_id.split(b"-")[0]) - 1,
        token_ids=struct.unpack(f"<{len(tokens) // 4}I", tokens),
        finish_reason=int(fields[b"f"]),
        epoch=int(fields[b"e"]),
        extras=fields[b"x"],
    )


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Marks the error as seen, or asyncio warns when nobody awaits the task."""
    if not task.cancelled():
        task.exception()
