"""A peer's HTTP server as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx

from outrider.shared.errors import ConfigError, OutriderError

_STOP_TIMEOUT_S = 10.0


class PeerError(OutriderError):
    """A peer did not start, or gave an unexpected answer."""


class ServerProcess:
    """Runs within the `with` block, ready when entered. Its output goes to `log`.

    Entering raises ConfigError that names `option` if the command cannot be run, PeerError if it does not serve.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        option: str,
        start_timeout_s: float,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """environ: beyond this process's own."""
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._log = log
        self._option = option
        self._start_timeout_s = start_timeout_s
        self._environ = {**os.environ, **(environ or {})}

    def __enter__(self) -> Self:
        with self._log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    self._command, stdout=out, stderr=subprocess.STDOUT, env=self._environ, start_new_session=True
                )
            except OSError as error:
                raise ConfigError(f"{self._option} {self._command[0]}: {error.strerror}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Holds it and its children still within the `with` block: idle servers of some peers poll."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def last_words(self) -> str:
        """The end of its output."""
        return self._log.read_text(errors="replace")[-2000:]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"{' '.join(self._command)} did not start; its log ends with: {self.last_words()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
