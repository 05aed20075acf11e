"""The stack's own Redis. The whole stack is run by the tests in tests/e2e."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import redis

from client.stack import Stack
from client.stack_commands import StackSettings


def until_written(run_dir: Path, value: bytes) -> None:
    """What a file has been given outlives the process; Redis may put that off while the disk is slow."""
    deadline = time.monotonic() + 60
    while not any(value in path.read_bytes() for path in run_dir.glob("redis/appendonlydir/*.incr.aof")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_redis_keeps_what_was_committed(tmp_path: Path) -> None:
    stack = Stack(StackSettings(model="", draft_model=""), tmp_path, lambda _message: None)
    try:
        with redis.Redis.from_url(stack._start_redis()) as client:
            client.set("key", "value", ex=60)
            until_written(tmp_path, b"value")
        os.kill(stack._processes["redis"].pid, signal.SIGKILL)
        stack._processes["redis"].wait()
        with redis.Redis.from_url(stack._start_redis()) as client:
            assert client.get("key") == b"value"
            assert 0 < client.ttl("key") <= 60
    finally:
        stack.stop()
