"""The processes of ranks 1 and up: any thread may wait until one has ended, and learns which one and its exit code."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess


class RankProcesses:
    """Holds the started processes, in order of rank from 1."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes
        # The kernel reports an exit code once: of two threads that reap one child, the later would get None.
        self._reaping = threading.Lock()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def death(self, timeout_s: float | None) -> str | None:
        """Describes which rank has died, waiting at most timeout_s (None: without limit); None if none has."""
        ended = connection.wait([process.sentinel for process in self._processes], timeout_s)
        for rank, process in enumerate(self._processes, start=1):
            if process.sentinel in ended:
                with self._reaping:
                    process.join()
                return f"tensor-parallel rank {rank} has died (exit code {process.exitcode})"
        return None

    def stop(self, timeout_s: float) -> None:
        """Gives each process timeout_s to end, then kills it."""
        for process in self._processes:
            with self._reaping:
                process.join(timeout_s)
                if process.is_alive():
                    process.kill()
                    process.join()
