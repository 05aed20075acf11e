"""The data of a simulated Redis: the commands that the commit log uses, and its real scripts, run by Lua 5.1.

A script is compiled once; replies are those of Redis in RESP2, errors included. test_redis_node.py
compares them with a real Redis.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lupa import lua51
from redis.exceptions import NoScriptError, ResponseError

_NO_SCRIPT = "No matching script. Please use EVAL."
_OLD_ID = "The ID specified in XADD is equal or smaller than the target stream top item"
_LUA: Any = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=False)
_COMPILED: dict[bytes, Any] = {}  # by source
_EntryId = tuple[int, int]


class Stream:
    """Entries by rising id."""

    def __init__(self, entries: Sequence[tuple[_EntryId, list[bytes]]] = ()) -> None:
        self.entries = list(entries)

    def add(self, entry_id: _EntryId, fields: list[bytes]) -> None:
        if self.entries and self.entries[-1][0] >= entry_id:
            raise ResponseError(_OLD_ID)
        self.entries.append((entry_id, fields))

    def between(self, first: bytes, last: bytes) -> list[list[Any]]:
        low = (0, 0) if first == b"-" else _entry_id(first)
        high = (1 << 64, 0) if last == b"+" else _entry_id(last)
        return [[b"%d-%d" % key, fields] for key, fields in self.entries if low <= key <= high]


class RedisStore:
    """Keys with their values, until they expire by this thread's wall clock."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes | dict[bytes, bytes] | Stream] = {}
        self._expires_at: dict[bytes, float] = {}
        self._scripts: dict[bytes, Any] = {}

    def run(self, words: Sequence[bytes]) -> Any:
        """Returns the reply; an error is returned too."""
        try:
            return getattr(self, f"_{words[0].decode().lower()}")(*words[1:])
        except ResponseError as error:
            return error

    def peek(self, key: bytes) -> Any:
        """Returns what is there: bytes, a hash, a stream, or None."""
        return self._find(key)

    def copy(self, keys: Iterable[bytes]) -> RedisStore:
        """Returns a store of its own with these keys, and with all scripts."""
        copied = RedisStore()
        copied._scripts = self._scripts
        for key in keys:
            value = self._find(key)
            if value is not None:
                copied._values[key] = _copied(value)
        return copied

    def _find(self, key: bytes) -> Any:
        if self._expires_at.get(key, float("inf")) <= time.time():
            self._del(key)
        return self._values.get(key)

    def _ping(self) -> bytes:
        return b"PONG"

    def _get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._find(key)
        return found

    def _getrange(self, key: bytes, first: bytes, last: bytes) -> bytes:
        """Not here: positions from the end, but for the last byte."""
        end = int(last) + 1
        return (self._find(key) or b"")[int(first) : end if end else None]

    def _set(self, key: bytes, value: bytes, _ex: bytes, seconds: bytes) -> bytes:
        self._values[key] = value
        self._expires_at[key] = time.time() + int(seconds)
        return b"OK"

    def _del(self, *keys: bytes) -> int:
        there = [key for key in keys if self._values.pop(key, None) is not None]
        for key in there:
            self._expires_at.pop(key, None)
        return len(there)

    def _expire(self, key: bytes, seconds: bytes) -> int:
        if self._find(key) is None:
            return 0
        self._expires_at[key] = time.time() + int(seconds)
        return 1

    def _hset(self, key: bytes, *pairs: bytes) -> int:
        found = self._find(key)
        fields = self._values.setdefault(key, {}) if found is None else found
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def _hmget(self, key: bytes, *names: bytes) -> list[bytes | None]:
        fields = self._find(key) or {}
        return [fields.get(name) for name in names]

    def _xadd(self, key: bytes, entry_id: bytes, *fields: bytes) -> bytes:
        stream = self._find(key) or Stream()
        stream.add(_entry_id(entry_id), list(fields))
        self._values[key] = stream
        return entry_id

    def _xrange(self, key: bytes, first: bytes, last: bytes) -> list[list[Any]]:
        stream = self._find(key)
        return [] if stream is None else stream.between(first, last)

    def _xrevrange(self, key: bytes, last: bytes, first: bytes, _count: bytes, count: bytes) -> list[list[Any]]:
        return self._xrange(key, first, last)[::-1][: int(count)]

    # ---- scripts ----

    def _script(self, action: bytes, source: bytes = b"") -> bytes:
        if action == b"FLUSH":
            self._scripts.clear()
            return b"OK"
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        if source not in _COMPILED:
            _COMPILED[source] = _LUA.execute(b"return function(redis, KEYS, ARGV) " + source + b"\nend")
        self._scripts[sha] = _COMPILED[source]
        return sha

    def _evalsha(self, sha: bytes, num_keys: bytes, *words: bytes) -> Any:
        script = self._scripts.get(sha)
        if script is None:
            raise NoScriptError(_NO_SCRIPT)
        keys, args = words[: int(num_keys)], words[int(num_keys) :]
        redis = _LUA.table_from({b"call": self._call})
        return _from_lua(script(redis, _LUA.table_from(keys), _LUA.table_from(args)))

    def _call(self, *words: Any) -> Any:
        """redis.call. Redis writes whole numbers as such."""
        texts = [word if isinstance(word, bytes) else b"%.17g" % word for word in words]
        return _to_lua(getattr(self, f"_{texts[0].decode().lower()}")(*texts[1:]))


def _copied(value: bytes | dict[bytes, bytes] | Stream) -> bytes | dict[bytes, bytes] | Stream:
    if isinstance(value, Stream):
        return Stream(value.entries)
    return dict(value) if isinstance(value, dict) else value


def _entry_id(text: bytes) -> _EntryId:
    first, _, second = text.partition(b"-")
    return int(first), int(second or 0)


def _to_lua(reply: Any) -> Any:
    if reply is None:
        return False
    return _LUA.table_from([_to_lua(part) for part in reply]) if isinstance(reply, list) else reply


def _from_lua(value: Any) -> Any:
    if isinstance(value, float):
        return int(value)
    if lua51.lua_type(value) != "table":
        return value
    parts = [_from_lua(value[place]) for place in range(1, len(value) + 1)]
    return parts
