"""The commit log: one Redis stream per session, the only truth about what a session has said.

An entry's id is made from the output index of its first token (index + 1, because Redis ids start above 0-0). One
small script on the server refuses a gap, a repeat and an old epoch, so a gateway that has been passed over (a
zombie) cannot write. Appends of all sessions that are ready at the same moment travel in one pipeline.

Not here: what a token means. Tokens travel as the bytes the caller gives.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import CommitRefused, InternalError, Unavailable

# KEYS: stream, state. ARGV: epoch, base_len, count, tokens, finish reason, time to live in seconds.
# Returns {1, committed_len} when appended, {0, committed_len, epoch} when refused. The same append once more (its
# reply was lost with a connection) is found in place and counts as appended, not as a repeat.
APPEND_SCRIPT = """
local state = redis.call('HMGET', KEYS[2], 'epoch', 'len')
local epoch = tonumber(state[1] or 0)
local len = tonumber(state[2] or 0)
local base = tonumber(ARGV[2])
local id = string.format('%.0f-0', base + 1)
if tonumber(ARGV[1]) < epoch then return {0, len, epoch} end
local there = redis.call('XRANGE', KEYS[1], id, id)
if #there == 1 then
  local f = there[1][2]
  if f[2] == ARGV[3] and f[4] == ARGV[4] and f[6] == ARGV[5] and f[8] == ARGV[1] then return {1, len, epoch} end
end
if base ~= len or #there == 1 then return {0, len, epoch} end
redis.call('XADD', KEYS[1], id, 'n', ARGV[3], 't', ARGV[4], 'f', ARGV[5], 'e', ARGV[1])
len = base + tonumber(ARGV[3])
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'len', string.format('%.0f', len))
redis.call('EXPIRE', KEYS[1], ARGV[6])
redis.call('EXPIRE', KEYS[2], ARGV[6])
return {1, len, epoch}
"""


# Appends and reads are tried again for this long while Redis is gone: a restart of Redis is no error of any request.
RETRY_S = 5.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True)
class LogEntry:
    """Tokens from output index `base_len` on; `finish_reason` is 0 while the session goes on."""

    base_len: int
    token_ids: tuple[int, ...]
    finish_reason: int


@dataclass(frozen=True)
class _Append:
    session_id: str
    epoch: int
    entry: LogEntry
    done: asyncio.Future[None]


class CommitLog:
    """Appends and reads; one per gateway process. Call `start` in the event loop that uses it, `close` at the end."""

    def __init__(
        self, client: aioredis.Redis, *, ttl_s: int, retry_s: float = RETRY_S, key_prefix: str = "outrider"
    ) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._retry_s = retry_s
        self._key_prefix = key_prefix
        self._queue: asyncio.Queue[_Append] = asyncio.Queue(maxsize=4096)
        self._writer: asyncio.Task[None] | None = None
        self._script_sha = ""

    @classmethod
    def connect(cls, url: str, *, ttl_s: int, retry_s: float = RETRY_S) -> CommitLog:
        return cls(aioredis.Redis.from_url(url), ttl_s=ttl_s, retry_s=retry_s)

    async def start(self) -> None:
        """Raises Unavailable when Redis does not answer."""
        try:
            self._script_sha = await self._client.script_load(APPEND_SCRIPT)
        except (RedisError, OSError) as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        self._writer = asyncio.create_task(self._write_forever(), name="commit-log-writer")

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            self._writer = None
        while not self._queue.empty():
            _fail([self._queue.get_nowait()], Unavailable("the gateway is shutting down"))
        await self._client.aclose()

    async def ping(self) -> bool:
        try:
            return bool(await self._client.ping())
        except (RedisError, OSError):
            return False

    async def append(
        self,
        session_id: str,
        *,
        epoch: int,
        base_len: int,
        token_ids: tuple[int, ...],
        finish_reason: int,
    ) -> None:
        """Returns once Redis has the entry. Raises CommitRefused (gap, repeat, old epoch) or Unavailable."""
        if self._writer is None:
            raise Unavailable("the commit log is not open")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = LogEntry(base_len, token_ids, finish_reason)
        await self._queue.put(_Append(session_id, epoch, entry, done))
        await done

    async def read(self, session_id: str) -> list[LogEntry]:
        """All entries that stand now, in order of their output index. Raises Unavailable."""
        stream, _ = self._keys(session_id)
        try:
            raw_entries: Any = await self._patiently(lambda: self._client.xrange(stream))
        except (RedisError, OSError) as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        return [
            LogEntry(int(entry_id.split(b"-")[0]) - 1, _unpack(fields[b"t"]), int(fields[b"f"]))
            for entry_id, fields in raw_entries
        ]

    def _keys(self, session_id: str) -> tuple[str, str]:
        # The braces keep both keys of a session on one node of a Redis cluster.
        return f"{self._key_prefix}:{{{session_id}}}:log", f"{self._key_prefix}:{{{session_id}}}:state"

    async def _write_forever(self) -> None:
        while True:
            appends = [await self._queue.get()]
            while not self._queue.empty():
                appends.append(self._queue.get_nowait())
            try:
                await self._write(appends)
            except asyncio.CancelledError:
                _fail(appends, Unavailable("the gateway is shutting down"))
                raise
            except (RedisError, OSError) as error:
                _fail(appends, Unavailable(f"Redis does not answer: {error}"))

    async def _write(self, appends: list[_Append]) -> None:
        replies = await self._patiently(lambda: self._execute(appends))
        if any(isinstance(reply, NoScriptError) for reply in replies):  # Redis restarted and forgot the script
            await self._client.script_load(APPEND_SCRIPT)
            replies = await self._patiently(lambda: self._execute(appends))
        for append, reply in zip(appends, replies, strict=True):
            _settle(append, reply)

    async def _patiently(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Again after a lost connection: an append that had arrived all the same is found in place by the script."""
        deadline = time.monotonic() + self._retry_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await command()
            except (RedisConnectionError, RedisTimeoutError, OSError):
                if time.monotonic() + pause_s > deadline:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _execute(self, appends: list[_Append]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for append in appends:
            entry = append.entry
            pipeline.evalsha(
                self._script_sha,
                2,
                *self._keys(append.session_id),
                append.epoch,
                entry.base_len,
                len(entry.token_ids),
                _pack(entry.token_ids),
                entry.finish_reason,
                self._ttl_s,
            )
        return list(await pipeline.execute(raise_on_error=False))


def _settle(append: _Append, reply: Any) -> None:
    if append.done.cancelled():
        return
    if isinstance(reply, Exception):
        append.done.set_exception(InternalError(f"the commit script failed: {reply}"))
    elif reply[0] == 1:
        append.done.set_result(None)
    else:
        append.done.set_exception(
            CommitRefused(
                f"session {append.session_id}: append at {append.entry.base_len} of epoch {append.epoch} refused, "
                f"the log stands at {reply[1]} of epoch {reply[2]}"
            )
        )


def _fail(appends: list[_Append], error: Exception) -> None:
    for append in appends:
        if not append.done.done():
            append.done.set_exception(error)


def _pack(token_ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _unpack(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)
