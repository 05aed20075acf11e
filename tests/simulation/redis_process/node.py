"""Redis as a simulated process: it runs the real scripts (store.py); a journal of commands is its file.

A restart forgets scripts. What else is lost is what `fsync` allows when the machine loses power: nothing with "always",
the last second with "everysec" (two, as Redis' manual says), all without a file. test_redis_node.py
compares it with a real Redis.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from outrider.shared.log import commit_scripts
from tests.simulation.links import Later, Link, Network
from tests.simulation.loop import Process
from tests.simulation.redis_process.log_rules import WRITERS, LogRules, Message, written
from tests.simulation.redis_process.store import RedisStore

# seconds of writes; what each mode may lose with the machine's power
LOST_S = {"always": 0.0, "everysec": 2.0, "no": float("inf")}
_OUT_OF_MEMORY = "command not allowed when used memory > 'maxmemory'."
_WRITES = (b"SET", b"EVALSHA", b"XADD", b"DEL", b"HSET", b"EXPIRE", b"PEXPIRE")


@dataclass
class Journal:
    """Write commands with the times at which they were done."""

    commands: list[tuple[float, list[bytes]]] = field(default_factory=list)

    def without_last(self, seconds: float, now: float) -> Journal:
        return Journal([entry for entry in self.commands if entry[0] <= now - seconds])


class RedisNode:
    """One Redis. on_append: called with the name of each log and the output index that it reaches, when it grows."""

    def __init__(
        self,
        net: Network,
        process: Process,
        journal: Journal,
        on_append: Callable[[str, int], None],
        rules: LogRules,
    ) -> None:
        self.process = process
        self.is_full = False
        self.journal = journal
        self._net = net
        self._on_append = on_append
        self._rules = rules
        self._store = RedisStore()
        net.servers["redis"] = self
        self._replay()

    def _replay(self) -> None:
        """Does the journal's commands again, at their own times: what has expired since stays expired."""
        for script in commit_scripts.ALL:
            self._store.run([b"SCRIPT", b"LOAD", script.encode()])
        clock, now = self.process, self._net.loop.time()
        offset = clock.clock_offset_s
        for when, command in self.journal.commands:
            clock.clock_offset_s = offset + when - now
            self._store.run(command)
        clock.clock_offset_s = offset
        self._store.run([b"SCRIPT", b"FLUSH"])

    def execute(self, words: tuple[Any, ...]) -> Any:
        """Runs one command; an error is returned."""
        command = list(map(_bytes, words))
        is_write = command[0] in _WRITES
        if is_write and self.is_full:
            return OutOfMemoryError(_OUT_OF_MEMORY)
        message = Message(script, command) if (script := _script_of(command)) in WRITERS else None
        before = written(self._store, message) if message is not None else None
        reply = self._store.run(command)
        if is_write and not isinstance(reply, Exception):
            self.journal.commands.append((self._net.loop.time(), command))
            self._watch(command)
            if message is not None and before is not None:
                self._rules.ran(message, before, self._store)
        return reply

    def _watch(self, command: list[bytes]) -> None:
        """Reports how far each log reaches that an append or a restore has touched."""
        if command[0] != b"EVALSHA":
            return
        for name in command[3 : 3 + int(command[2])]:
            if name.endswith(b":log"):
                last = self._store.run([b"XREVRANGE", name, b"+", b"-", b"COUNT", b"1"])
                if last:
                    entry_id, fields = last[0]
                    self._on_append(name.decode(), int(entry_id.split(b"-")[0]) - 1 + int(fields[1]))

    def tokens(self, name: str) -> list[tuple[int, int]] | None:
        """The tokens in a log, each with its session's epoch; None if there is no such log."""
        entries = self._store.run([b"XRANGE", name.encode(), b"-", b"+"])
        tokens: list[tuple[int, int]] = []
        for _, fields in entries:
            data, epoch = fields[3], int(fields[7])
            tokens += [(token_id, epoch) for token_id in struct.unpack(f"<{len(data) // 4}I", data)]
        return tokens if entries else None


class SimRedisClient:
    """The part of redis.asyncio.Redis that the commit log uses, over simulated links."""

    def __init__(self, net: Network, process: Process) -> None:
        self._net, self._process = net, process
        self.connection_pool = self

    async def get_connection(self) -> SimRedisConnection:
        return SimRedisConnection(self._net, self._process)

    async def _call(self, *words: Any) -> Any:
        connection = SimRedisConnection(self._net, self._process)
        try:
            await connection.send(words)
            return await connection.read_response()
        finally:
            await connection.disconnect()

    async def ping(self) -> Any:
        return await self._call("PING")

    async def script_load(self, script: str) -> Any:
        return await self._call("SCRIPT", "LOAD", script)

    async def set(self, key: str, value: bytes, ex: int) -> Any:
        return await self._call("SET", key, value, "EX", ex)

    async def aclose(self) -> None:
        """Its connections were closed by whoever opened them."""


class SimRedisConnection:
    """One connection. It connects when something is sent, as redis-py's does."""

    def __init__(self, net: Network, process: Process) -> None:
        self._net, self._process = net, process
        self._link: Link | None = None
        self._replies: asyncio.Queue[Any] = asyncio.Queue()

    async def send_packed_command(self, packed: bytes, check_health: bool = True) -> None:
        for words in _unpacked(packed):
            await self.send(words)

    async def send(self, words: tuple[Any, ...]) -> None:
        link = self._connected()
        replies, node = self._replies, self._net.servers["redis"]
        assert isinstance(node, RedisNode)
        name = _name(words)

        def execute() -> None:
            reply = node.execute(words)
            link.send(
                Later("{} {}".format, name, Later(_shown, reply)), lambda: replies.put_nowait(reply), by_client=False
            )

        link.send(name, execute, by_client=True)
        await asyncio.sleep(0)

    def _connected(self) -> Link:
        if self._link is not None and self._link.client.is_open:
            return self._link
        node = self._net.servers.get("redis")
        if not isinstance(node, RedisNode) or node.process.is_dead:
            raise RedisConnectionError("connection refused")
        replies: asyncio.Queue[Any] = asyncio.Queue()
        self._replies = replies
        self._link = self._net.connect(self._process, node.process, "redis")
        self._link.client.lost.append(lambda: replies.put_nowait(RedisConnectionError("connection closed by server")))
        return self._link

    async def read_response(self) -> Any:
        reply = await self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def disconnect(self, nowait: bool = False) -> None:
        if self._link is not None:
            self._link.close(by_client=True)
            self._link = None


def _bytes(word: Any) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def _unpacked(packed: bytes) -> list[tuple[bytes, ...]]:
    """The commands in RESP."""
    commands, at = [], 0

    def line() -> bytes:
        nonlocal at
        end = packed.index(b"\r\n", at)
        found, at = packed[at:end], end + 2
        return found

    while at < len(packed):
        words = []
        for _ in range(int(line()[1:])):
            size = int(line()[1:])
            words.append(packed[at : at + size])
            at += size + 2
        commands.append(tuple(words))
    return commands


_SCRIPT_NAMES = ("BEGIN", "APPEND", "RESTORE", "CLAIM")


def _name(words: tuple[Any, ...]) -> str:
    """The command in a trace: a script's name, its first key, and the positions in its arguments."""
    name = _bytes(words[0]).decode()
    if name != "EVALSHA":
        return f"{name} {_bytes(words[1])[:60].decode('utf-8', 'replace')}" if len(words) > 1 else name
    script = _script_of(words)
    num_keys = int(words[2])
    args = words[3 + num_keys :]
    shown = "" if script in ("BEGIN", "CLAIM") else f" term={_bytes(args[0]).decode()}"
    if script == "APPEND":
        shown += f" base_len={_bytes(args[3]).decode()} n={_bytes(args[4]).decode()} finish={_bytes(args[6]).decode()}"
    return f"{script} {_bytes(words[3]).decode()}{shown}"


def _script_of(words: Sequence[Any]) -> str:
    """Returns the name of the script that a command runs; "": none."""
    return _name_of(_bytes(words[1]).decode()) if _bytes(words[0]) == b"EVALSHA" else ""


@functools.lru_cache(maxsize=256)
def _name_of(sha: str) -> str:
    """A script's name by its digest."""
    digests = [hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in commit_scripts.ALL]
    return _SCRIPT_NAMES[digests.index(sha)] if sha in digests else "script"


def _shown(reply: Any) -> str:
    if isinstance(reply, bytes):
        return f"{len(reply)} bytes"
    return repr(reply)[:60]
