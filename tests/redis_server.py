"""A real redis-server for tests: its own port, its own folder, gone at the end.

with RedisServer(tmp_path) as server:
    CommitLog.connect(server.url, ttl_s=60)

It can be stopped, killed, frozen, and made to lose the last of what it has written, as a machine without power does.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

from outrider.client.stack.own_redis import redis_answers
from tests.ports import server_port

START_TIMEOUT_S = 60.0


class RedisServer:
    """Started by `with` or `start`; `restart` keeps the data (append-only file) and forgets loaded scripts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = server_port()  # also while it is stopped
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError(
                "redis-server is not on the PATH: `make redis` installs it, these tests need the real one"
            )
        log = self._directory / "redis.log"
        self._process = subprocess.Popen(
            [
                binary,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--logfile", str(log)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not redis_answers(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text() if log.exists() else "nothing"
                raise RuntimeError(f"redis-server did not start on port {self.port}; it said: {said}")
            time.sleep(0.02)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)  # a frozen one would not end
            process.terminate()
            process.wait(timeout=START_TIMEOUT_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=START_TIMEOUT_S)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing, until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def num_bytes_written(self) -> int:
        return self._append_only_file().stat().st_size

    def lose_what_came_after(self, num_bytes: int) -> None:
        """Kills it and starts it anew with the first so many bytes of its append-only file."""
        self.kill()
        with self._append_only_file().open("r+b") as file:
            file.truncate(num_bytes)
        self.start()

    def _append_only_file(self) -> Path:
        [path] = self._directory.glob("appendonlydir/*.incr.aof")
        return path

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("redis-server is not running")
        self._process.send_signal(signum)
