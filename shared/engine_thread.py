"""The thread that owns an engine: it takes commands from any thread, waits a moment for more where that pays, works.

Not here: what a command or a piece of work is (the services' engines).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

Command = Callable[[], None]
log = logging.getLogger(__name__)


class EngineThread:
    """`command` may be called from any thread; everything else that is given runs on the engine's own.

    patience_s() is asked after each batch of commands: how long more commands are worth waiting for before the work
    that is there begins. 0 begins at once.
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
        """Returns after the work in progress has ended; commands that came too late are not run."""
        with self._wake:
            self._stopping.set()
            self._wake.notify()
        self._thread.join()

    def command(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._stopping.is_set() or self._has_work()):
                    self._wake.wait()
            if not self._take_commands():
                return
            self._work()

    def _take_commands(self) -> bool:
        """Runs what has come, and what comes while there is patience; False when the thread is to end."""
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
        """One that fails is a bug of ours, and must not take every session with it."""
        try:
            command()
        except Exception:
            log.exception("a command to the engine failed")
