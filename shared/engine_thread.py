"""The thread that owns an engine: it takes commands from any thread, optionally waits for more, then works.

Not here: commands and work themselves (the services' engines).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Command = Callable[[], None]
log = logging.getLogger(__name__)


class EngineThread:
    """Runs the engine's work on one thread. `command` may be called from any thread, the callbacks run on this one.

    patience_s() is called after each batch of commands: seconds to wait for more before work begins; 0 is none.
    """

    def __init__(
        self,
        name: str,
        *,
        has_work: Callable[[], bool],
        work: Callable[[], None],
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._has_work = has_work
        self._work = work
        self._patience_s = patience_s
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns after the current work; later commands are dropped."""
        with self._wake:
            self._stopping.set()
            self._wake.notify()
        self._thread.join()

    def command(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def between_rounds(self, act: Callable[[], T]) -> T:
        """Returns act(), called on this thread between two works; from any other thread."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(act())
            except Exception as error:
                done.set_exception(error)

        self.command(run)
        return done.result()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._stopping.is_set() or self._has_work()):
                    self._wake.wait()
            if not self._take_commands():
                return
            self._work()

    def _take_commands(self) -> bool:
        """Runs the commands that have come and those that come within patience; False when the thread is to end."""
        while True:
            with self._wake:
                if self._stopping.is_set():
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                self._run_command(command)
            patience_s = self._patience_s()
            with self._wake:
                if self._stopping.is_set():
                    return False
                if patience_s <= 0.0 or not (self._commands or self._wake.wait(patience_s)):
                    return True

    def _run_command(self, command: Command) -> None:
        """Logs a failing command, which is our bug, and keeps the other sessions running."""
        try:
            command()
        except Exception:
            log.exception("a command to the engine failed")
