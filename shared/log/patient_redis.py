"""Redis with retries: pipelines many callers' commands and retries them for up to `patience_s`.

A restart, a failover, a full or a hanging Redis only delays the callers; they get Unavailable after `patience_s`. A
command may reach Redis twice, so send only idempotent ones. A failing command delays no other.

Commands use a redis-py connection without its pipeline and encoder: at one stream the two took a third of the gateway's
time per token.

Not here: what the commands mean (commit_log.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outrider.shared.errors import InternalError, LogUnavailable, Unavailable

log = logging.getLogger(__name__)

# A command's words; built again for every attempt.
Words = tuple[str | bytes | int, ...]
Command = Callable[[], Words]

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
# seconds; an attempt at a hanging Redis, after which a new connection may help
_LONGEST_ATTEMPT_S = 2.0
_MAX_QUEUED = 4096
# Transient errors: out of memory, replica, scripts lost, cluster changing; then codes that redis-py has no class for:
# long script, disk not writable, no replicas.
_TRANSIENT_ERRORS = (OutOfMemoryError, ReadOnlyError, NoScriptError, ClusterDownError, TryAgainError)
_TRANSIENT_CODES = ("BUSY", "MISCONF", "NOREPLICAS")
# At the start, retrying does not help against these.
_REFUSALS = (AuthenticationError, AuthorizationError, ResponseError)


@dataclass(eq=False)
class _Call:
    command: Command
    reply: asyncio.Future[Any]
    retry_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    problem: str = field(default="no answer")


@dataclass(frozen=True)
class RedisState:
    """The state of Redis. refusal: why it takes no writes; empty if it does."""

    answers: bool
    refusal: str = ""


class PatientRedis:
    """A Redis client that retries. Missing `scripts` are loaded.

    Call `start` in the event loop that uses it, `close` at the end.
    """

    def __init__(self, client: aioredis.Redis, *, patience_s: float, scripts: Sequence[str]) -> None:
        self.patience_s = patience_s
        self._attempt_s = min(_LONGEST_ATTEMPT_S, patience_s / 2)
        self._client = client
        # Used only by the sender.
        self._connection: AbstractConnection | None = None
        self._scripts = tuple(scripts)
        self._queue: asyncio.Queue[_Call] = asyncio.Queue(_MAX_QUEUED)
        self._sender: asyncio.Task[None] | None = None
        # Loop time before which no attempt is made while Redis is unreachable.
        self._not_before = 0.0
        self._outage_pause_s = _FIRST_PAUSE_S

    @classmethod
    def connect(cls, url: str, *, patience_s: float, scripts: Sequence[str]) -> Self:
        """Options in the URL's query override the connect timeout set here."""
        client = aioredis.Redis.from_url(
            url,
            socket_timeout=None,  # one timeout covers a whole attempt
            socket_connect_timeout=min(_LONGEST_ATTEMPT_S, patience_s / 2),
            retry=Retry(NoBackoff(), 0),  # retries are ours: redis-py's know nothing of the other callers
        )
        return cls(client, patience_s=patience_s, scripts=scripts)

    async def start(self) -> None:
        """Waits for Redis. Raises Unavailable when it refuses, or does not answer within patience_s."""
        loop = asyncio.get_running_loop()
        patient_until, has_warned = loop.time() + self.patience_s, False
        while (problem := await self._not_ready()) is not None:
            if isinstance(problem, _REFUSALS) or loop.time() >= patient_until:
                raise Unavailable(f"Redis does not answer: {self._describe(problem)}") from problem
            if not has_warned:
                log.warning("waiting for Redis: %s", self._describe(problem))
                has_warned = True
            await asyncio.sleep(_LONGEST_PAUSE_S)
        self._sender = asyncio.create_task(self._send_forever(), name="redis-sender")

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
            self._sender = None
        while not self._queue.empty():
            _fail([self._queue.get_nowait()], Unavailable("the gateway is shutting down"))
        await self._disconnect()
        await self._client.aclose()

    async def check_write(self, key: str) -> RedisState:
        """Writes an empty value to `key`, for a minute."""
        try:
            async with asyncio.timeout(self._attempt_s):
                await self._client.set(key, b"", ex=60)
        except ResponseError as error:  # full, read-only, its disk not writable
            return RedisState(answers=True, refusal=str(error))
        except (RedisError, OSError):
            return RedisState(answers=False)
        return RedisState(answers=True)

    async def call(self, command: Command) -> Any:
        """The command's reply. Raises LogUnavailable after patience_s, InternalError for an invalid command."""
        if self._sender is None:
            raise Unavailable("the connection to Redis is not open")
        call = _Call(command, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self.patience_s):
                await self._queue.put(call)
                return await call.reply
        except TimeoutError:
            raise LogUnavailable(f"Redis has not answered for {self.patience_s:g} s ({call.problem})") from None

    async def _not_ready(self) -> Exception | None:
        """Connects and loads the scripts within one attempt; returns the error, or None."""
        try:
            async with asyncio.timeout(self._attempt_s):
                await self._client.ping()
                await self._load_scripts()
        except (RedisError, OSError) as error:
            return error
        return None

    def _describe(self, error: Exception) -> str:
        return str(error) or f"no answer within {self._attempt_s:g} s"

    async def _load_scripts(self) -> None:
        for script in self._scripts:
            await self._client.script_load(script)

    async def _send_forever(self) -> None:
        waiting: list[_Call] = []
        try:
            while True:
                waiting += await self._arrivals(waiting)
                now = asyncio.get_running_loop().time()
                due = [
                    call for call in waiting if max(call.retry_at, self._not_before) <= now and not call.reply.done()
                ]
                if due:
                    await self._attempt(due)
                waiting = [call for call in waiting if not call.reply.done()]
        finally:
            _fail(waiting, Unavailable("the gateway is shutting down"))

    async def _arrivals(self, waiting: list[_Call]) -> list[_Call]:
        """The new commands; returns at the latest when one of `waiting` is due again."""
        arrived: list[_Call] = []
        if not waiting:
            arrived.append(await self._queue.get())
        else:
            due_at = min(max(call.retry_at, self._not_before) for call in waiting)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_at):
                    arrived.append(await self._queue.get())
        while not self._queue.empty():
            arrived.append(self._queue.get_nowait())
        return arrived

    async def _attempt(self, calls: list[_Call]) -> None:
        """Sends all commands, then reads all replies. Unsettled commands are retried."""
        try:
            async with asyncio.timeout(self._attempt_s):
                replies = await self._exchange([call.command() for call in calls])
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            await self._disconnect()
            self._postpone(calls, error)
            return
        except Exception as error:
            await self._disconnect()  # unread replies would be taken for the next commands'
            log.error("an exchange with Redis failed", exc_info=error)
            _fail(calls, InternalError(f"a command to Redis failed: {error}"))
            return
        self._outage_pause_s = _FIRST_PAUSE_S
        has_failures = False
        for call, reply in zip(calls, replies, strict=True):
            _settle(call, reply)
            has_failures |= isinstance(reply, Exception)
        if has_failures:
            await self._recover(replies)

    async def _exchange(self, commands: Sequence[Words]) -> list[Any]:
        """The replies, errors included, in the commands' order."""
        if self._connection is None:
            self._connection = await self._client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        connection = self._connection
        # The stub wrongly says "a tuple of one".
        packed = b"".join(hiredis.pack_command(words) for words in commands)  # type: ignore[arg-type]
        await connection.send_packed_command(packed, check_health=False)
        return [await _reply(connection) for _ in commands]

    async def _disconnect(self) -> None:
        """The next attempt reconnects and resolves the host name again."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    def _postpone(self, calls: list[_Call], error: Exception) -> None:
        self._not_before = asyncio.get_running_loop().time() + self._outage_pause_s
        self._outage_pause_s = min(2 * self._outage_pause_s, _LONGEST_PAUSE_S)
        for call in calls:
            call.problem = self._describe(error)

    async def _recover(self, replies: Sequence[Any]) -> None:
        """Reloads scripts after a Redis restart; reconnects when it has become a replica."""
        try:
            if any(isinstance(reply, NoScriptError) for reply in replies):
                async with asyncio.timeout(self._attempt_s):
                    await self._load_scripts()
            if any(isinstance(reply, ReadOnlyError) for reply in replies):
                await self._disconnect()
        except (RedisError, OSError):
            return  # the next attempt fails likewise and waits


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _settle(call: _Call, reply: Any) -> None:
    if call.reply.done():
        return
    if not isinstance(reply, Exception):
        call.reply.set_result(reply)
    elif isinstance(reply, _TRANSIENT_ERRORS) or str(reply).partition(" ")[0] in _TRANSIENT_CODES:
        call.problem = str(reply)
        call.retry_at = asyncio.get_running_loop().time() + call.pause_s
        call.pause_s = min(2 * call.pause_s, _LONGEST_PAUSE_S)
    else:
        call.reply.set_exception(InternalError(f"a command to Redis failed: {reply}"))


def _fail(calls: Sequence[_Call], error: Exception) -> None:
    for call in calls:
        if not call.reply.done():
            call.reply.set_exception(error)
