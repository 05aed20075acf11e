"""Redis for those who can wait a while: commands of many callers in one pipeline, tried again until patience is over.

A restart, a failover, a full or a hanging Redis is a pause for whoever waits, and Unavailable only when it lasts longer
than `patience_s`. A command may reach Redis twice, so only send what is the same when it is done twice. One command
that fails holds up no other.

Commands go over one connection of redis-py's, but without its pipeline and its encoder: the two took a third of the
gateway's time per token at one stream.

Not here: what the commands mean (commit_log.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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

from shared.errors import InternalError, Unavailable

log = logging.getLogger(__name__)

# A command's words; asked for anew at every attempt.
Words = tuple[str | bytes | int, ...]
Command = Callable[[], Words]

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
# An attempt at a Redis that hangs ends after this: a new connection may be what helps.
_LONGEST_ATTEMPT_S = 2.0
_MAX_QUEUED = 4096
# Replies that say "not now", not "never": full, a replica, its scripts forgotten, a cluster on the move; and the first
# words of those that redis-py has no class for: a script that runs long, a disk that cannot be written, no replicas.
_PASSING_ERRORS = (OutOfMemoryError, ReadOnlyError, NoScriptError, ClusterDownError, TryAgainError)
_PASSING_CODES = ("BUSY", "MISCONF", "NOREPLICAS")
# Who is told this at the start need not wait.
_REFUSALS = (AuthenticationError, AuthorizationError, ResponseError)


@dataclass(eq=False)
class _Call:
    command: Command
    reply: asyncio.Future[Any]
    retry_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    problem: str = field(default="it has said nothing")


class PatientRedis:
    """Call `start` in the event loop that uses it, `close` at the end. `scripts` are loaded where they are missing."""

    def __init__(self, client: aioredis.Redis, *, patience_s: float, scripts: Sequence[str]) -> None:
        self.patience_s = patience_s
        self._attempt_s = min(_LONGEST_ATTEMPT_S, patience_s / 2)
        self._client = client
        # The sender's own.
        self._connection: AbstractConnection | None = None
        self._scripts = tuple(scripts)
        self._queue: asyncio.Queue[_Call] = asyncio.Queue(_MAX_QUEUED)
        self._sender: asyncio.Task[None] | None = None
        # While Redis cannot be reached, nobody tries before this moment of the loop's clock.
        self._not_before = 0.0
        self._outage_pause_s = _FIRST_PAUSE_S

    @classmethod
    def connect(cls, url: str, *, patience_s: float, scripts: Sequence[str]) -> PatientRedis:
        """Options in the URL's query win over the time to connect that is set here."""
        client = aioredis.Redis.from_url(
            url,
            socket_timeout=None,  # an attempt has one clock for all that it sends and reads
            socket_connect_timeout=min(_LONGEST_ATTEMPT_S, patience_s / 2),
            retry=Retry(NoBackoff(), 0),  # the retries are ours: theirs know nothing of the other callers
        )
        return cls(client, patience_s=patience_s, scripts=scripts)

    async def start(self) -> None:
        """Raises Unavailable when Redis refuses, or does not answer for as long as any command would wait."""
        loop = asyncio.get_running_loop()
        patient_until, is_told = loop.time() + self.patience_s, False
        while (problem := await self._not_ready()) is not None:
            if isinstance(problem, _REFUSALS) or loop.time() >= patient_until:
                raise Unavailable(f"Redis does not answer: {self._words_of(problem)}") from problem
            if not is_told:
                log.warning("waiting for Redis: %s", self._words_of(problem))
                is_told = True
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

    async def ping(self) -> bool:
        try:
            async with asyncio.timeout(self._attempt_s):
                return bool(await self._client.ping())
        except (RedisError, OSError):
            return False

    async def call(self, command: Command) -> Any:
        """The command's reply. Raises Unavailable when patience is over, InternalError for a command that is wrong."""
        if self._sender is None:
            raise Unavailable("the connection to Redis is not open")
        call = _Call(command, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self.patience_s):
                await self._queue.put(call)
                return await call.reply
        except TimeoutError:
            raise Unavailable(f"Redis took nothing for {self.patience_s:g} s ({call.problem})") from None

    async def _not_ready(self) -> Exception | None:
        """Why it could not be asked, and given its scripts, within one attempt."""
        try:
            async with asyncio.timeout(self._attempt_s):
                await self._client.ping()
                await self._load_scripts()
        except (RedisError, OSError) as error:
            return error
        return None

    def _words_of(self, error: Exception) -> str:
        return str(error) or f"no answer within {self._attempt_s:g} s"

    async def _load_scripts(self) -> None:
        for script in self._scripts:
            await self._client.script_load(script)

    async def _send_forever(self) -> None:
        waiting: list[_Call] = []
        try:
            while True:
                waiting += await self._arrivals(waiting)
                waiting = [call for call in waiting if not call.reply.done()]
                now = asyncio.get_running_loop().time()
                due = [call for call in waiting if max(call.retry_at, self._not_before) <= now]
                if due:
                    await self._attempt(due)
        finally:
            _fail(waiting, Unavailable("the gateway is shutting down"))

    async def _arrivals(self, waiting: list[_Call]) -> list[_Call]:
        """What has been asked for since, at the latest when one of `waiting` is due again."""
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
        """All commands at once, then all replies. Those that are not settled then are tried again."""
        try:
            async with asyncio.timeout(self._attempt_s):
                replies = await self._exchange([call.command() for call in calls])
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            await self._disconnect()
            self._put_off(calls, error)
            return
        except Exception as error:
            await self._disconnect()  # replies that nobody reads would be taken for the next commands'
            log.error("an exchange with Redis failed", exc_info=error)
            _fail(calls, InternalError(f"a command to Redis failed: {error}"))
            return
        self._outage_pause_s = _FIRST_PAUSE_S
        for call, reply in zip(calls, replies, strict=True):
            _settle(call, reply)
        await self._mend(replies)

    async def _exchange(self, commands: Sequence[Words]) -> list[Any]:
        """The replies, errors among them, in the commands' order."""
        if self._connection is None:
            self._connection = await self._client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        connection = self._connection
        # Its stub says "a tuple of one".
        packed = b"".join(hiredis.pack_command(words) for words in commands)  # type: ignore[arg-type]
        await connection.send_packed_command(packed, check_health=False)
        return [await _reply(connection) for _ in commands]

    async def _disconnect(self) -> None:
        """The next attempt makes the connection anew, and asks for the name of the host anew."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    def _put_off(self, calls: list[_Call], error: Exception) -> None:
        self._not_before = asyncio.get_running_loop().time() + self._outage_pause_s
        self._outage_pause_s = min(2 * self._outage_pause_s, _LONGEST_PAUSE_S)
        for call in calls:
            call.problem = self._words_of(error)

    async def _mend(self, replies: Sequence[Any]) -> None:
        """A Redis that was restarted has forgotten the scripts; one that is a replica now has left its name."""
        try:
            if any(isinstance(reply, NoScriptError) for reply in replies):
                await self._load_scripts()
            if any(isinstance(reply, ReadOnlyError) for reply in replies):
                await self._disconnect()
        except (RedisError, OSError):
            return  # the next attempt meets the same trouble and waits for its end


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
    elif isinstance(reply, _PASSING_ERRORS) or str(reply).partition(" ")[0] in _PASSING_CODES:
        call.problem = str(reply)
        call.retry_at = asyncio.get_running_loop().time() + call.pause_s
        call.pause_s = min(2 * call.pause_s, _LONGEST_PAUSE_S)
    else:
        call.reply.set_exception(InternalError(f"a command to Redis failed: {reply}"))


def _fail(calls: Sequence[_Call], error: Exception) -> None:
    for call in calls:
        if not call.reply.done():
            call.reply.set_exception(error)
